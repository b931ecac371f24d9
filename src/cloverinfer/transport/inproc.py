"""Endpoints in one process: a put is a copy and an entry in the peer's queue.

Knows nothing of other processes: an address means something only where it was made.
"""

from __future__ import annotations

import queue
import secrets
import threading

import numpy as np
import numpy.typing as npt

from .. import _native
from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ._shared import (
    MAX_MESSAGE_BYTES,
    OffsetRanges,
    OwnRegion,
    allocate,
    callers_memory,
    check_message,
    check_no_event,
    check_prepare,
    check_put_bytes,
    check_region_open,
    checked_notice,
    deadline_after,
    index_array,
    seconds_left,
)
from .base import (
    DEFAULT_TIMEOUT,
    Capabilities,
    DeviceMemory,
    Endpoint,
    Events,
    Peer,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
)
from .native import NearWire

_endpoints: dict[str, InprocEndpoint] = {}
"""Every open endpoint of this process by its address. Single dict operations are atomic."""


def missing() -> str:
    """See ``transport.base``: a process can always reach itself."""
    return ""


class InprocRegion(OwnRegion):
    """A region that waits, when it is closed, for the copies that are being made into it: what
    the caller does with its own memory afterwards must not be written over.
    """

    def __init__(self, endpoint: InprocEndpoint, ref: RegionRef, buffer: memoryview) -> None:
        super().__init__(ref, buffer, endpoint._forget)
        self._writers = 0
        self._changed = threading.Condition()

    def __enter__(self) -> memoryview:
        with self._changed:
            if self.closed:
                raise TransportError(f"the remote region {self.ref.name} is closed")
            self._writers += 1
            return self.buffer

    def __exit__(self, *exc: object) -> None:
        with self._changed:
            self._writers -= 1
            if self.closed:
                self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            super().close()
            if not self._changed.wait_for(lambda: not self._writers, DEFAULT_TIMEOUT):
                raise DeadlineError(f"region {self.ref.name} is still being written to")


class InprocPeer(Peer):
    """Holds the other endpoint itself; None where it is gone already."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.endpoint = _endpoints.get(address)


class InprocRanges(OffsetRanges):
    def __init__(self, peer: Peer, local: Slices, remote: Slices, target: InprocRegion) -> None:
        super().__init__(peer, local, remote)
        self.target = target


class InprocEndpoint(Endpoint):
    """See ``Endpoint``; nothing ever waits but ``poll``, since queues have no bound."""

    capabilities = Capabilities(
        name="inproc",
        cross_process=False,
        cross_host=False,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        self.name = name
        self._address = f"{self.capabilities.name}://{name}-{secrets.token_hex(6)}"
        self._closed = False
        self._inbox: queue.SimpleQueue[tuple[str, int | bytes]] = queue.SimpleQueue()
        self._peers: dict[str, InprocPeer] = {}
        self._regions: dict[str, InprocRegion] = {}
        self._registered = 0
        self._near = NearWire(_near_of)
        _endpoints[self._address] = self

    def address(self) -> str:
        return self._address

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        buffer = allocate(memory) if isinstance(memory, int) else callers_memory(memory)
        self._registered += 1
        ref = RegionRef(self._address, f"g{self._registered}", buffer.nbytes)
        region = InprocRegion(self, ref, buffer)
        self._regions[ref.name] = region
        return region

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        if address not in _endpoints:
            raise TransportError(f"there is no endpoint at {address} in this process")
        return self._peer(address)

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self._address, peer, local, remote)
        assert isinstance(remote.region, RegionRef)
        target = self._open_endpoint(peer)._regions.get(remote.region.name)
        if target is None or target.ref != remote.region:
            raise TransportError(f"{peer.address} has no region {remote.region.name}")
        return InprocRanges(peer, local, remote, target)

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        assert isinstance(ranges, InprocRanges)
        notice = checked_notice(notice)
        check_no_event(after)
        index = index_array(index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        receiver = self._open_endpoint(ranges.peer)
        check_region_open(ranges.region)
        with ranges.target as target:
            self._copy(ranges, target, index)
        receiver._inbox.put((self._address, notice))
        return Ticket(done=True)

    def _copy(self, ranges: InprocRanges, target: memoryview, index: npt.NDArray[np.int32]) -> None:
        _native.copy_ranges(
            target,
            ranges.target_offsets,
            ranges.source,
            ranges.source_offsets,
            ranges.length,
            index,
        )

    def native(self) -> NearWire | None:
        return self._near

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        check_message(message, self.capabilities.max_message_bytes)
        self._open_endpoint(peer)._inbox.put((self._address, message))

    def poll(self, timeout: float) -> Events:
        self._check_open()
        events = Events()
        deadline = deadline_after(timeout)
        try:
            self._sort(self._inbox.get(timeout=seconds_left(deadline)), events)
        except queue.Empty:
            return events
        # What has arrived by now and no more: a fast sender must not keep us here.
        for _ in range(self._inbox.qsize()):
            self._sort(self._inbox.get_nowait(), events)
        return events

    def _sort(self, item: tuple[str, int | bytes], events: Events) -> None:
        peer = self._peer(item[0])
        if isinstance(item[1], int):
            events.notices.append((peer, item[1]))
        else:
            events.messages.append((peer, item[1]))

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Nothing is to be done: the writer itself writes, in ``put``, which has returned."""

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        _endpoints.pop(self._address, None)
        for region in list(self._regions.values()):
            region.close()

    def _peer(self, address: str) -> InprocPeer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = InprocPeer(address)
        return peer

    def _open_endpoint(self, peer: Peer) -> InprocEndpoint:
        assert isinstance(peer, InprocPeer)
        if peer.endpoint is None or peer.endpoint._closed:
            raise TransportError(f"the peer {peer.address} has closed its endpoint")
        return peer.endpoint

    def _forget(self, region: OwnRegion) -> None:
        self._regions.pop(region.ref.name, None)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the endpoint {self.name} is closed")


def _near_of(peer: Peer) -> NearWire | None:
    endpoint = _endpoints.get(peer.address)
    return None if endpoint is None else endpoint.native()
