"""Fixtures of the transport suites: each runs once for every line of ``transport_kit.WIRES``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.transport_kit import Make, Wire, segments, wire_params

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint, create_endpoint, missing


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(params=wire_params(), scope="module")
def wire(request: pytest.FixtureRequest) -> Wire:
    assert isinstance(request.param, Wire)
    if request.param.name == "ray":
        request.getfixturevalue("embedded_ray")
    reason = missing(request.param.name)
    if reason:
        pytest.skip(reason)
    return request.param


@pytest.fixture
def make(wire: Wire) -> Iterator[Make]:
    made: list[Endpoint] = []

    def create(name: str, network: NetworkConfig | None = None) -> Endpoint:
        made.append(create_endpoint(wire.name, name, network))
        return made[-1]

    yield create
    for endpoint in made:
        endpoint.close()
    assert segments() == []


@pytest.fixture
def pair(make: Make) -> tuple[Endpoint, Endpoint]:
    return make("a"), make("b")
