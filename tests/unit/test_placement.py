"""Where nodes run, and the addresses they listen at there."""

from __future__ import annotations

import msgspec
import pytest

from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import ConfigError
from cloverinfer.orchestrator.placement import Place, network_at, on_this_host
from cloverinfer.transport.choice import offer

HERE = Place(offer("dense-0"), cores=2)
FAR = Place(offer("dense-1"), cores=8, address="198.18.0.2")


def test_on_one_host_nodes_listen_where_they_are_told():
    network = NetworkConfig(bind_host="0.0.0.0", advertise_host="gate.example")
    assert network_at(network, HERE) == network


def test_on_several_hosts_a_node_listens_at_its_own():
    assert network_at(NetworkConfig(port=4000), FAR).bind_host == "198.18.0.2"
    assert network_at(NetworkConfig(port=4000), FAR).port == 4000


@pytest.mark.parametrize("everywhere", ["0.0.0.0", "::"])
def test_at_every_interface_it_tells_its_hosts_address(everywhere):
    network = network_at(NetworkConfig(bind_host=everywhere), FAR)
    assert (network.bind_host, network.advertise_host) == (everywhere, "198.18.0.2")


@pytest.mark.parametrize("field", ["bind_host", "advertise_host"])
def test_an_address_that_only_one_host_has_is_refused(field):
    network = msgspec.structs.replace(NetworkConfig(), **{field: "198.18.0.7"})
    with pytest.raises(ConfigError, match=f"network.{field} .*one host's"):
        network_at(network, FAR)


def test_who_sees_whose_processes():
    assert HERE.sees(FAR)
    elsewhere = msgspec.structs.replace(FAR.offer, host="another boot")
    assert not HERE.sees(msgspec.structs.replace(FAR, offer=elsewhere))
    contained = msgspec.structs.replace(FAR.offer, shared="another mount")
    assert not HERE.sees(msgspec.structs.replace(FAR, offer=contained))


def test_nodes_of_one_process_are_in_this_one():
    threads = on_this_host(["a", "b"], one_process=True)
    assert {place.offer.process for place in threads.nodes.values()} == {
        threads.scheduler.offer.process
    }
    processes = on_this_host(["a", "b"])
    assert len({place.offer.process for place in processes.nodes.values()}) == 2


@pytest.mark.parametrize(
    ("device", "taken"), [("cpu", "mlx5_0"), ("cuda:0", "mlx5_0"), ("cuda:1", "mlx5_3")]
)
def test_a_node_takes_the_rdma_device_of_its_gpu(monkeypatch, device, taken):
    monkeypatch.setenv("CLOVER_RDMA_DEVICES", "mlx5_0, mlx5_3")
    placement = on_this_host(["dense-0"])
    place = placement.nodes["dense-0"]
    assert network_at(NetworkConfig(), place, device).rdma_device == taken
    assert network_at(NetworkConfig(), placement.scheduler).rdma_device == "mlx5_0"
    named = NetworkConfig(rdma_device="mlx5_7")
    assert network_at(named, place, device) == named
    monkeypatch.delenv("CLOVER_RDMA_DEVICES")
    nowhere = on_this_host(["dense-0"]).nodes["dense-0"]
    assert network_at(NetworkConfig(), nowhere, device).rdma_device is None
