"""Fixtures of the transport suites: each runs once for every line of ``transport_kit.WIRES``."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.transport_kit import RDMA_SPIN_US, Make, Wire, segments, wire_params
from tests.transport_partner import Partner, Start

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint, create_endpoint, missing
from cloverinfer.transport.shm import remove_leftovers


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[None]:
    import ray

    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", context.address_info["gcs_address"])  # for other processes
        yield
    ray.shutdown()


@pytest.fixture(scope="module")
def ready(request: pytest.FixtureRequest) -> Callable[[Wire], Wire]:
    """The wire with all that it needs, or a skip that says what is missing."""

    def prepared(wire: Wire) -> Wire:
        if wire.name == "ray":
            request.getfixturevalue("embedded_ray")
        reason = missing(wire.name)
        if reason:
            pytest.skip(reason)
        return wire

    return prepared


@pytest.fixture(params=wire_params(), scope="module")
def wire(request: pytest.FixtureRequest, ready: Callable[[Wire], Wire]) -> Wire:
    return ready(request.param)


@pytest.fixture
def make(wire: Wire) -> Iterator[Make]:
    made: list[Endpoint] = []
    before = segments()

    def create(name: str, network: NetworkConfig | None = None) -> Endpoint:
        network = msgspec.structs.replace(network or NetworkConfig(), rdma_spin_us=RDMA_SPIN_US)
        made.append(create_endpoint(wire.name, name, network))
        return made[-1]

    yield create
    for endpoint in made:
        endpoint.close()
    assert segments() == before


@pytest.fixture
def pair(make: Make) -> tuple[Endpoint, Endpoint]:
    return make("a"), make("b")


@pytest.fixture
def start(make: Make) -> Iterator[Start]:
    ours = make("ours")
    started: list[Partner] = []

    def begin(nbytes: int, port: int = 0) -> Partner:
        started.append(Partner(ours, nbytes, port))
        return started[-1]

    yield begin
    for partner in started:
        partner.process.kill()
        partner.process.wait()
        remove_leftovers(partner.process.pid)
