"""The first transport of the order that both ends have, and one reason for each before it."""

from itertools import chain

import msgspec
import pytest

from cloverinfer import ClusterConfig
from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import ConfigError
from cloverinfer.orchestrator.layout import choose_transport, node_names, with_secret
from cloverinfer.orchestrator.placement import on_this_host
from cloverinfer.transport import choice as choices
from cloverinfer.transport.base import Capabilities
from cloverinfer.transport.choice import Offer, PassedOver, choose, choose_for_all, offer

ABLE = {
    "inproc": Capabilities("inproc", False, False, True, 100),
    "cuda_ipc": Capabilities("cuda_ipc", True, False, True, 100, memory=("cuda", "host")),
    "shm": Capabilities("shm", True, False, False, 100),
    "tcp": Capabilities("tcp", True, True, True, 100),
}
A = Offer("a", host="h1", shared="s1", process="p1")
NO_CUDA = PassedOver("cuda_ipc", "no end has cuda memory to move")


@pytest.fixture(autouse=True)
def transports(monkeypatch):
    monkeypatch.setattr(choices, "transport_names", lambda: ["null", *ABLE])
    monkeypatch.setattr(choices, "capabilities", ABLE.__getitem__)
    monkeypatch.setattr(choices, "missing", lambda name: "")
    monkeypatch.setattr(choices, "_unreachable", lambda: ())


def other(**changes):
    return msgspec.structs.replace(A, name="b", **changes)


def test_one_process_copies():
    assert choose(A, other()) == choices.Choice("inproc")


def test_one_host_shares_memory():
    chosen = choose(A, other(process="p2"))
    assert chosen.transport == "shm"
    assert chosen.passed_over == (
        PassedOver("inproc", "a and b are in different processes"),
        NO_CUDA,
    )


def test_containers_without_common_memory_and_hosts_take_a_wire():
    chosen = choose(A, other(process="p2", shared="s2"))
    assert chosen.transport == "tcp"
    assert chosen.passed_over[2] == PassedOver(
        "shm", "a and b are in containers that share no memory"
    )
    chosen = choose(A, other(process="p1", host="h2"))
    assert chosen.transport == "tcp"
    assert {one.reason for one in chosen.passed_over} == {"a and b are on different hosts"}


GPU = {"memory": ("host", "cuda"), "process": "p2", "device": 1}


def test_device_memory_takes_what_moves_it_from_or_to_a_device_at_one_end_at_least():
    mine = msgspec.structs.replace(A, memory=("host", "cuda"), device=0)
    assert choose(mine, other(**GPU)).transport == "cuda_ipc"
    assert choose(A, other(**GPU)).transport == "cuda_ipc"
    assert choose_for_all([(A, other(process="p3")), (A, other(**GPU))]).transport == "cuda_ipc"


def test_elsewhere_device_memory_goes_through_the_hosts():
    chosen = choose(A, other(**GPU | {"host": "h2"}))
    assert chosen.transport == "tcp"
    assert PassedOver("cuda_ipc", "a and b are on different hosts") in chosen.passed_over
    assert choose(A, other(**GPU | {"process": "p1"})).transport == "inproc"


def test_devices_that_do_not_reach_each_other_share_the_hosts_memory():
    apart = {"memory": ("host", "cuda"), "unreachable": ((0, 1), (1, 0))}
    mine = msgspec.structs.replace(A, device=0, **apart)
    chosen = choose(mine, other(**GPU | apart))
    assert chosen.transport == "shm"
    assert PassedOver("cuda_ipc", "GPUs 0 and 1 of a and b do not reach each other") in (
        chosen.passed_over
    )
    assert choose(mine, other(**GPU | apart | {"device": 0})).transport == "cuda_ipc"


@pytest.mark.parametrize(
    ("topology", "gpus", "chosen"),
    [
        ("colocated", ("colocated",), "shm"),
        ("pd", ("decode",), "cuda_ipc"),
        ("pda", ("prefill", "dense"), "cuda_ipc"),
        ("pda", ("dense",), "shm"),
    ],
)
def test_a_cluster_takes_cuda_ipc_where_blocks_move_from_or_to_a_gpu(topology, gpus, chosen):
    cluster = ClusterConfig(topology=topology, executor="process")
    names = list(chain(*node_names(cluster).values()))
    devices = {name: "cuda:0" if name.startswith(gpus) else "cpu" for name in names}
    assert choose_transport(cluster, on_this_host(names), devices).transport == chosen


def test_what_a_host_lacks_is_the_reason():
    chosen = choose(A, other(process="p2", missing={"shm": "/dev/shm is missing"}))
    assert chosen.transport == "tcp"
    assert PassedOver("shm", "b: /dev/shm is missing") in chosen.passed_over


def test_a_cluster_takes_what_every_pair_can_use():
    near, far = other(), other(process="p2", host="h2")
    assert choose_for_all([(A, near), (A, far)]).transport == "tcp"


def test_an_offer_of_this_process_meets_itself():
    assert choose(offer("here"), offer("there")).transport == "inproc"
    assert choose(offer("here"), offer("there", process="there")).transport == "shm"


@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
def test_a_named_transport_is_taken_or_refused_with_the_reason(topology, monkeypatch):
    threads = ClusterConfig(topology=topology, executor="local", transport="shm")
    names = list(chain(*node_names(threads).values()))
    assert choose_transport(threads, on_this_host(names, True)) == choices.Choice("shm")
    monkeypatch.setattr(choices, "missing", lambda name: f"{name} is broken")
    broken = on_this_host(names, True)
    with pytest.raises(ConfigError, match="shm cannot be used: scheduler: shm is broken"):
        choose_transport(threads, broken)
    with pytest.raises(ConfigError, match="no transport connects all nodes: inproc: scheduler"):
        choose_transport(msgspec.structs.replace(threads, transport="auto"), broken)


def test_the_secret_is_never_shown():
    config = with_secret(ClusterConfig(network=NetworkConfig(secret="swordfish")))
    fresh = with_secret(ClusterConfig())
    assert config.network.secret == "swordfish"
    assert len(fresh.network.secret) == 64
    assert "swordfish" not in f"{config} {config!r} {config.network}"
    assert fresh.network.secret not in repr(fresh)
