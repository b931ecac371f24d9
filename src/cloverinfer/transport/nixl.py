"""Endpoints whose puts are NIXL writes (its UCX plugin): shared memory, RDMA or TCP, as UCX finds.

NIXL moves bytes and nothing else here. Notices, messages and questions about regions travel over an
inner ``tcp`` endpoint: NIXL cannot sleep until a notification comes, and does not say when a peer
dies. A put is written and flushed before its notice is sent, so the data is there first.

Fencing: a region is taken back only after every peer that may write to it has said that it will not
any more, or is gone. How NIXL is called is ``_nixl_agent``'s.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import weakref
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from .. import _native
from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ._control import MESSAGE, NOTICE, OVERHEAD, Control
from ._nixl_agent import Agent, PreparedList, find_package
from ._shared import (
    MAX_MESSAGE_BYTES,
    OffsetRanges,
    OwnRegion,
    allocate,
    callers_memory,
    check_index,
    check_message,
    check_no_event,
    check_prepare,
    check_put_bytes,
    check_region_open,
    checked_notice,
    deadline_after,
    index_array,
    is_forked,
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
from .tcp import TcpEndpoint

_OPEN, _REVOKE = b"o", b"r"
"""Questions, followed by a region's name: may I write to it; will you write to it no more."""

_MOST_STALE = 256

_open_endpoints: weakref.WeakSet[NixlEndpoint] = weakref.WeakSet()


def missing() -> str:
    """See ``transport.base``."""
    if find_package():
        return ""
    return "the package of NIXL is not installed: pip install 'cloverinfer[nixl]'"


@atexit.register
def _close_all() -> None:
    """What was not closed: agents have threads, which must not meet the end of the interpreter and
    of the libraries that they run in.
    """
    for endpoint in list(_open_endpoints):
        endpoint.close()


class Grant(msgspec.Struct, frozen=True):
    """The answer to a question for a region."""

    pointer: int
    """Where the region is in the process that owns it."""
    nbytes: int
    metadata: bytes
    """What the peer's agent must load to write there."""


_NO_GRANT = Grant(0, 0, b"")


class NixlPeer(Peer):
    """``lock`` guards what follows and is held while bytes are being written."""

    def __init__(self, address: str, inner: Peer) -> None:
        super().__init__(address)
        self.inner = inner
        self.lock = threading.Lock()
        self.agent_name = ""
        self.loads = 0
        """How often the remote agent was forgotten: lists prepared before are of no use."""
        self.targets: dict[str, Target] = {}
        self.stale: list[Grant] = []
        """Regions that were taken back, and whose keys the agent still has."""


@dataclass
class Target:
    """A peer's region. ``closed``: its owner has taken it back, or is gone."""

    grant: Grant = _NO_GRANT
    """Until the owner has answered."""
    closed: bool = False
    loaded: int = -1
    """``NixlPeer.loads`` when the agent loaded its metadata."""


@dataclass(eq=False)
class NixlRegion:
    """What this endpoint knows of a region of its own."""

    region: OwnRegion
    key: int
    pointer: int
    writers: dict[str, NixlPeer] = field(default_factory=dict)
    """Peers that asked for it, by address."""


class NixlRanges(OffsetRanges):
    """``target`` is an own region where the peer is this endpoint itself."""

    def __init__(
        self, peer: Peer, local: Slices, remote: Slices, target: Target | OwnRegion
    ) -> None:
        super().__init__(peer, local, remote)
        self.target = target
        self.prepared: tuple[PreparedList, PreparedList] | None = None
        self.loaded = -1


class NixlEndpoint(Endpoint):
    """See ``Endpoint``. A put returns when its bytes are at the peer, so its ticket is done. Pieces
    of one put may be written in any order.
    """

    capabilities = Capabilities(
        name="nixl",
        cross_process=True,
        cross_host=True,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES - OVERHEAD,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        reason = missing()
        if reason:
            raise TransportError(f"the nixl transport cannot be used: {reason}")
        self.name = name
        self._closed = False
        self._owner = os.getpid()
        self._registered = 0
        self._regions: dict[str, NixlRegion] = {}
        self._regions_lock = threading.Lock()
        """Whoever was granted a region is asked before it goes; nobody is granted one that goes."""
        self._peers: dict[str, NixlPeer] = {}
        self._peers_lock = threading.Lock()
        inner = self._inner = TcpEndpoint(name, network)
        try:
            self._agent = Agent(f"{name}-{secrets.token_hex(8)}")
            self._control = Control(inner, self._answer)
        except BaseException:
            inner.close()
            raise
        self._address = _outer(inner.address())
        _open_endpoints.add(self)

    @property
    def dropped(self) -> int:
        """Strangers, and records that made no sense."""
        return self._inner.dropped + self._control.dropped

    def address(self) -> str:
        return self._address

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        buffer = allocate(memory) if isinstance(memory, int) else callers_memory(memory)
        pointer = np.frombuffer(buffer, np.uint8).ctypes.data
        key = self._agent.register(pointer, buffer.nbytes)
        self._registered += 1
        ref = RegionRef(self._address, f"g{self._registered}", buffer.nbytes)
        region = OwnRegion(ref, buffer, self._take_back)
        with self._regions_lock:
            self._regions[ref.name] = NixlRegion(region, key, pointer)
        return region

    def _take_back(self, region: OwnRegion) -> None:
        with self._regions_lock:
            own = self._regions.pop(region.ref.name)
        deadline = deadline_after(DEFAULT_TIMEOUT)
        question = _REVOKE + region.ref.name.encode()
        try:
            for peer in own.writers.values():
                # One that is gone cannot write; one that does not answer might.
                with contextlib.suppress(_GoneError):
                    self._ask(peer, question, deadline)
        finally:
            self._agent.deregister(own.key)

    def _ask(self, peer: NixlPeer, question: bytes, deadline: float) -> bytes:
        try:
            return self._control.ask(peer.inner, question, deadline)
        except DeadlineError:
            raise
        except TransportError as error:
            raise _GoneError(f"{self.name} to {peer.address}: {error}") from error

    def _answer(self, inner: Peer, question: bytes) -> bytes:
        """Runs on the answering thread."""
        peer = self._peer(inner)
        kind, name = question[:1], question[1:].decode("ascii", "replace")
        if kind == _OPEN:
            return self._grant(peer, name)
        if kind == _REVOKE:
            target = peer.targets.pop(name, None)
            if target is not None:
                self._drop(peer, target)
            return b""
        raise TransportError(f"no such question: {kind!r}")

    def _grant(self, peer: NixlPeer, name: str) -> bytes:
        with self._regions_lock:
            own = self._regions.get(name)
            if own is None:
                raise TransportError(f"{self._address} has no region {name}")
            metadata = self._agent.metadata(own.key)
            own.writers[peer.address] = peer
        return msgspec.msgpack.encode(Grant(own.pointer, own.region.ref.nbytes, metadata))

    def _drop(self, peer: NixlPeer, target: Target) -> None:
        """Waits for the put that is being written, then lets no other begin. The agent cannot drop
        the keys of one region, and UCX leaves sockets behind at every new connection: so keys are
        kept for a while.
        """
        with peer.lock:
            target.closed = True
            if target.loaded == peer.loads:
                peer.stale.append(target.grant)
            if len(peer.stale) >= _MOST_STALE:
                self._forget_agent(peer)

    def _forget_agent(self, peer: NixlPeer) -> None:
        """The next put loads again what it needs. The peer's lock is held."""
        if peer.agent_name:
            self._agent.forget(peer.agent_name)
        peer.loads += 1
        peer.stale.clear()

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        if not address.startswith("nixl://"):
            raise TransportError(f"{address!r} is not the address of a nixl endpoint")
        return self._peer(self._control.connect(_inner(address), deadline_after(timeout)))

    def _peer(self, inner: Peer) -> NixlPeer:
        with self._peers_lock:
            peer = self._peers.get(inner.address)
            if peer is None:
                peer = self._peers[inner.address] = NixlPeer(_outer(inner.address), inner)
            return peer

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self._address, peer, local, remote)
        assert isinstance(peer, NixlPeer)
        assert isinstance(remote.region, RegionRef)
        if peer.address == self._address:
            own = self._regions.get(remote.region.name)
            if own is None or own.region.ref != remote.region:
                raise TransportError(f"{self._address} has no region {remote.region.name}")
            return NixlRanges(peer, local, remote, own.region)
        return NixlRanges(peer, local, remote, self._target(peer, remote.region))

    def _target(self, peer: NixlPeer, ref: RegionRef) -> Target:
        target = peer.targets.get(ref.name)
        if target is None or target.closed or target.grant is _NO_GRANT:
            # Before asking: the owner may take back what it has just granted, and the answering
            # thread may hear of that before this one reads the grant.
            target = peer.targets[ref.name] = Target()
            answer = self._ask(peer, _OPEN + ref.name.encode(), deadline_after(DEFAULT_TIMEOUT))
            target.grant = msgspec.msgpack.decode(answer, type=Grant)
        if target.grant.nbytes != ref.nbytes:
            raise TransportError(f"{peer.address} has no region {ref.name} of {ref.nbytes} bytes")
        return target

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        assert isinstance(ranges, NixlRanges)
        assert isinstance(ranges.peer, NixlPeer)
        notice = checked_notice(notice)
        check_no_event(after)
        index = index_array(index)
        check_index(ranges, index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        check_region_open(ranges.region)
        deadline = deadline_after(timeout)
        if isinstance(ranges.target, OwnRegion):
            _copy_here(ranges, ranges.target, index)
        else:
            self._write(ranges, ranges.peer, index, deadline)
        self._control.send(ranges.peer.inner, NOTICE, notice, b"", deadline)
        return Ticket(done=True)

    def _write(
        self, ranges: NixlRanges, peer: NixlPeer, index: npt.NDArray[np.int32], deadline: float
    ) -> None:
        assert isinstance(ranges.target, Target)
        if not peer.lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError(f"other threads keep the way to {peer.address} busy")
        try:
            if ranges.target.closed:
                raise TransportError(f"a region of {peer.address} is closed")
            if len(index):
                self._write_now(ranges, peer, index, deadline)
        except TransportError as error:
            raise type(error)(f"{self.name} to {peer.address}: {error}") from error
        finally:
            peer.lock.release()

    def _write_now(
        self, ranges: NixlRanges, peer: NixlPeer, index: npt.NDArray[np.int32], deadline: float
    ) -> None:
        """Once more where the first failure may be that of keys of memory that was there before."""
        while True:
            again = bool(peer.stale)
            try:
                self._agent.write(*self._prepared(ranges, peer), index, deadline)
                return
            except TransportError as error:
                # Nothing that was given up may arrive later.
                self._forget_agent(peer)
                if not again or isinstance(error, DeadlineError):
                    raise

    def _prepared(self, ranges: NixlRanges, peer: NixlPeer) -> tuple[PreparedList, PreparedList]:
        """The agent's lists for these ranges, made anew where the peer was forgotten since."""
        assert isinstance(ranges.target, Target)
        if ranges.prepared is not None and ranges.loaded == peer.loads:
            return ranges.prepared
        grant = ranges.target.grant
        if ranges.target.loaded != peer.loads:
            peer.agent_name = self._agent.load(grant.metadata)
            ranges.target.loaded = peer.loads
        source = np.frombuffer(ranges.source, np.uint8).ctypes.data
        length, name = ranges.length, peer.agent_name
        local = self._agent.prepare(source, ranges.source_offsets, length)
        remote = self._agent.prepare(grant.pointer, ranges.target_offsets, length, name)
        ranges.prepared, ranges.loaded = (local, remote), peer.loads
        return ranges.prepared

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        assert isinstance(peer, NixlPeer)
        check_message(message, self.capabilities.max_message_bytes)
        self._control.send(peer.inner, MESSAGE, 0, message, deadline_after(timeout))

    def poll(self, timeout: float) -> Events:
        self._check_open()
        events = Events()
        for inner, what in self._control.take(seconds_left(deadline_after(timeout))):
            peer = self._peer(inner)
            if isinstance(what, int):
                events.notices.append((peer, what))
            else:
                events.messages.append((peer, what))
        return events

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Always refuses: NIXL knows no way to throw away what UCX has received in part."""
        raise TransportError(f"{self.name}: what {address} has put over nixl cannot be fenced")

    def close(self) -> None:
        """Regions go first, while peers can still be asked; the agent last."""
        if self._closed or is_forked(self._owner):
            return
        self._closed = True
        _open_endpoints.discard(self)
        try:
            for own in list(self._regions.values()):
                own.region.close()
        finally:
            self._control.close()
            for peer in self._peers.values():
                with peer.lock:
                    for target in peer.targets.values():
                        target.closed = True
            self._agent.close()

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the endpoint {self.name} is closed")


class _GoneError(TransportError):
    """The peer cannot be reached any more, or has refused."""


def _copy_here(ranges: NixlRanges, target: OwnRegion, index: npt.NDArray[np.int32]) -> None:
    """A put to oneself."""
    if target.closed:
        raise TransportError(f"the remote region {target.ref.name} is closed")
    offsets = ranges.target_offsets, ranges.source, ranges.source_offsets
    _native.copy_ranges(target.buffer, *offsets, ranges.length, index)


def _inner(address: str) -> str:
    return "tcp" + address[len("nixl") :]


def _outer(address: str) -> str:
    return "nixl" + address[len("tcp") :]
