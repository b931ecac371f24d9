"""Where nodes run, known before they are configured: what each offers, its host's address, its
cores. Knows neither what places them nor what they are told then.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import msgspec

from ..attention import gpus
from ..config.network import NetworkConfig, rdma_devices
from ..core.errors import ConfigError
from ..transport.choice import Offer, offer

_WILDCARDS = ("0.0.0.0", "::")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def here(name: str, process: str | None, address: str = "") -> Place:
    """The place on this host of an end called ``name``; ``process``: see ``offer``."""
    return Place(offer(name, process), usable_cores(), address, *gpus(), rdma_devices())


class Place(msgspec.Struct, frozen=True):
    """Of one node, or of the scheduler."""

    offer: Offer
    cores: int
    address: str = ""
    """Of its host, as other hosts reach it; empty where all are on one host."""
    gpus: int = 0
    """GPUs that it can compute on."""
    no_gpu: str = ""
    """Why there are none."""
    rdma_devices: tuple[str, ...] = ()
    """Of its host, in the order of the GPUs that they lie near to."""

    def sees(self, other: Place) -> bool:
        """Both see the same processes and shared memory."""
        return self.offer.host == other.offer.host and self.offer.shared == other.offer.shared


class Placement(msgspec.Struct, frozen=True):
    """The scheduler's place, which is this process, and every node's, by its name."""

    scheduler: Place
    nodes: dict[str, Place]


def on_this_host(names: Iterable[str], one_process: bool = False) -> Placement:
    """All nodes beside this process, or in it."""
    places = {name: here(name, None if one_process else name) for name in names}
    own = Place(offer("scheduler"), usable_cores(), rdma_devices=rdma_devices())
    return Placement(own, places)


def network_at(network: NetworkConfig, place: Place, device: str = "cpu") -> NetworkConfig:
    """What the endpoint at ``place`` of a node on ``device`` is told: where nodes are on several
    hosts it listens at its own host's address, or tells that one to its peers where it listens at
    every interface; and it takes its GPU's RDMA device where the host names them.

    ``ConfigError`` where ``network`` names an address, which only one of the hosts can have.
    """
    network = _with_rdma_device(network, place, device)
    if not place.address:
        return network
    if network.advertise_host is not None:
        raise ConfigError(
            "network.advertise_host is one host's, but the nodes are on several: leave it out"
        )
    if network.bind_host in _WILDCARDS:
        return msgspec.structs.replace(network, advertise_host=place.address)
    if network.bind_host != NetworkConfig().bind_host:
        raise ConfigError(
            f"network.bind_host {network.bind_host} is one host's, but the nodes are on several: "
            "leave it out, or set it to 0.0.0.0"
        )
    return msgspec.structs.replace(network, bind_host=place.address)


def _with_rdma_device(network: NetworkConfig, place: Place, device: str) -> NetworkConfig:
    names = place.rdma_devices
    if network.rdma_device is not None or not names:
        return network
    number = device.partition(":")[2] or "0"
    return msgspec.structs.replace(network, rdma_device=names[int(number) % len(names)])
