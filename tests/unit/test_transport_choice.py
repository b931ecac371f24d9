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
NO_CUDA = PassedOver("cuda_ipc", "a has no cuda memory")


@pytest.fixture(autouse=True)
def transports(monkeypatch):
    monkeypatch.setattr(choices, "transport_names", lambda: ["null", *ABLE])
    monkeypatch.setattr(choices, "capabilities", ABLE.__getitem__)
    monkeypatch.setattr(choices, "missing", lambda name: "")


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


def test_device_memory_takes_what_moves_it():
    gpu = {"memory": ("cuda",), "process": "p2"}
    ends = msgspec.structs.replace(A, memory=("cuda",)), other(**gpu)
    assert choose(*ends).transport == "cuda_ipc"
    chosen = choose(A, other(**gpu))
    reasons = {one.transport: one.reason for one in chosen.passed_over}
    assert reasons["cuda_ipc"] == "a has no cuda memory"
    assert reasons["shm"] == "it moves no cuda memory, which b has"
    assert chosen.transport == ""


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
