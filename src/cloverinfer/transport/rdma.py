"""Endpoints whose bytes are moved by RDMA network cards (InfiniBand, RoCE) alone.

Each direction between two endpoints is a link: ``network.rdma_queue_pairs`` reliable connected
queue pairs, and a control connection that both meet over as ``tcp`` endpoints do, which tells at
once when the other process is gone. A put is RDMA writes into the peer's registered memory, the
last of which carries the notice. A native engine (csrc/verbs) posts them; what notices and messages
mean is not known here.

A ticket is done once the peer's card has acknowledged all bytes. A queue pair that fails, or a put
that misses its deadline after some of it went out, ends the link: everything pending on it fails
with the reason, and its queue pairs are destroyed. A failure is told once, by a ticket, a put or a
message; what is used after that dials anew. ``Region.close`` asks peers to put there no more, then
destroys the region's key, and returns once nothing writes there.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from ..config.network import NetworkConfig
from ..core.errors import TransportError
from ._linked import LinkedEndpoint, LinkPeer, LinkRanges
from ._rdma_cuda import PEERMEM, CudaSide, way_to_cards
from ._shared import MAX_MESSAGE_BYTES, OwnRegion, seconds_left
from ._tcp_meet import Hello
from .base import Capabilities, DeviceMemory, Events, Peer, Region, RegionRef, Slices, Ticket

if TYPE_CHECKING:
    from .. import _verbs

log = logging.getLogger(__name__)
_MODULE = "cloverinfer._verbs"


def missing() -> str:
    """See ``transport.base``."""
    if importlib.util.find_spec(_MODULE) is None:
        return "it was not built: install libibverbs-dev (or rdma-core-devel) and build again"
    try:
        found = _bindings().devices()
    except ImportError as error:
        return f"{error}: install libibverbs1 and ibverbs-providers (or rdma-core)"
    if not found:
        return "this host has no RDMA device"
    active = any(line.rpartition(": ")[2].startswith("active") for line in found)
    return "" if active else f"no port of an RDMA device is active: {'; '.join(found)}"


def _bindings() -> ModuleType:
    return importlib.import_module(_MODULE)


class RdmaRanges(LinkRanges):
    """Offsets where native code reads them; ``pointer``: where local memory is for the card."""

    def __init__(
        self, peer: Peer, local: Slices, remote: Slices, region: int, pointer: int
    ) -> None:
        super().__init__(peer, local, remote)
        assert isinstance(remote.region, RegionRef)
        self.native = _bindings().VerbsRanges(
            (pointer, self.region.ref.nbytes),
            int(self.region.ref.name[1:]),
            self.source_offsets,
            (region, remote.region.nbytes),
            self.target_offsets,
            self.length,
        )


class RdmaEndpoint(LinkedEndpoint):
    """See ``Endpoint`` and the head of this module."""

    capabilities = Capabilities(
        name="rdma",
        cross_process=True,
        cross_host=True,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
        memory=("host", "cuda"),
    )
    _engine: _verbs.VerbsEngine

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        self._cuda: CudaSide | None = None
        self._device_memory: dict[str, DeviceMemory] = {}
        """By the region's name, with how cards reach it."""
        self._told: set[int] = set()
        """Links that have failed, and whose failure somebody has been told."""
        super().__init__(name, network or NetworkConfig(), 1)

    def _start(self, network: NetworkConfig) -> None:
        if importlib.util.find_spec(_MODULE) is None:
            raise TransportError(f"the rdma transport cannot be used: {missing()}")
        try:
            self._engine = _bindings().VerbsEngine(_settings(network))
        except ImportError as error:
            raise TransportError(f"the rdma transport cannot be used: {missing()}") from error

    @property
    def device(self) -> str:
        """Name of the device that moves its bytes."""
        return self._engine.device

    def _is_device(self, region: Region | RegionRef) -> bool:
        return isinstance(region, Region) and region.ref.name in self._device_memory

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        if not isinstance(memory, DeviceMemory):
            return super().register(memory)
        self._check_open()
        if memory.nbytes <= 0:
            raise ValueError(f"a region has at least one byte, not {memory.nbytes}")
        way = way_to_cards()
        cuda = self._cuda = self._cuda or CudaSide()

        def add(number: int) -> None:
            if way == PEERMEM:
                self._engine.add_device_region(number, memory.pointer, memory.nbytes)
                return
            with cuda.exported(memory) as (fd, offset):
                self._engine.add_dma_buf(number, fd, offset, memory.pointer, memory.nbytes)

        region = self._keep(memory.nbytes, memoryview(b""), add)
        self._device_memory[region.ref.name] = memory
        log.info("%s: %d bytes of device %d by %s", self.name, memory.nbytes, memory.device, way)
        return region

    def _make_ranges(self, peer: Peer, local: Slices, remote: Slices, region: int) -> RdmaRanges:
        assert isinstance(local.region, OwnRegion)
        if self._is_device(local.region):
            pointer = self._device_memory[local.region.ref.name].pointer
        else:
            pointer = np.frombuffer(local.region.buffer, np.uint8).ctypes.data
        return RdmaRanges(peer, local, remote, region, pointer)

    def _await(self, after: int | None, deadline: float) -> None:
        """The card knows no events of other devices, so the caller's thread waits."""
        if after is not None:
            self._cuda = self._cuda or CudaSide()
            self._cuda.wait(after, deadline)

    def _add_outgoing(self, sockets: list[int], deadline: float) -> int:
        (sock,) = sockets
        return self._engine.add_outgoing(sock, seconds_left(deadline))

    def _add_incoming(self, hello: Hello, sock: int) -> int:
        return self._engine.add_incoming(sock)

    def _fence(self, link: int, timeout: float) -> bool:
        self._engine.fence_incoming(link)
        return True

    def _link(self, peer: Peer, deadline: float) -> int:
        """The link there; a new one where the last has failed and somebody has been told."""
        assert isinstance(peer, LinkPeer)
        link = peer.link
        if link is None:
            return super()._link(peer, deadline)
        if not self._engine.problem(link):
            return link
        if link not in self._told:
            self._told.add(link)  # by the error that using it gives
            return link
        with self._dialling(peer, deadline):
            self._forget_link(peer, link)
        return super()._link(peer, deadline)

    def _forget_link(self, peer: LinkPeer, link: int) -> None:
        if peer.link == link:
            self._engine.drop_outgoing(link)
            self._told.discard(link)
            peer.link = None

    def poll(self, timeout: float) -> Events:
        events = super().poll(timeout)
        for line in self._engine.take_events():
            log.warning("%s: %s", self.name, line)
        return events

    def _finish(self, number: int, late: bool, problem: str) -> Ticket:
        if problem:
            peer = self._pending[number][1].peer
            assert isinstance(peer, LinkPeer)
            if peer.link is not None and self._engine.problem(peer.link):
                self._told.add(peer.link)
        return super()._finish(number, late, problem)

    def close(self) -> None:
        super().close()
        if self._cuda is not None:
            self._cuda.close()


def _settings(network: NetworkConfig) -> _verbs.Settings:
    """As the engine takes them."""
    made: _verbs.Settings = _bindings().Settings()
    made.device = network.rdma_device or ""
    made.port = network.rdma_port
    made.gid_index = -1 if network.rdma_gid_index is None else network.rdma_gid_index
    made.gid_type = network.rdma_gid_type
    made.gid_address = network.rdma_gid_address or ""
    made.mtu = network.rdma_mtu or 0
    made.queue_pairs = network.rdma_queue_pairs
    made.queue_depth = network.rdma_queue_depth
    made.signal_every = network.rdma_signal_every
    made.block_size = network.rdma_block_size
    made.retries = network.rdma_retries
    made.timeout = network.rdma_timeout
    made.service_level = network.rdma_service_level
    made.spin_us = network.rdma_spin_us
    made.on_demand = network.rdma_on_demand_paging
    return made
