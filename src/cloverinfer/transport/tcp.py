"""Endpoints over sockets: any two hosts that reach each other.

Each direction between two endpoints is a link: ``network.tcp_streams`` connections that the sender
dials and keeps. A native engine moves the bytes: scattered pieces are written from where they lie
and read to where they belong. What notices and messages mean is not known here.

A ticket is done once the peer has answered that all bytes are in its memory, so a put that is done
has been written, and one that failed for its region was not announced. A put that misses its
deadline after some of it went out ends its link, as the only way to be sure that no more of it
arrives; everything pending on the link fails with it, and so do later puts until ``connect`` makes
a new one: nothing that was lost is passed over in silence. ``Region.close`` returns once nothing
writes to the region any more.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    is_forked,
    seconds_left,
)
from ._tcp_accept import Acceptor
from ._tcp_address import TcpAddress, listen, whoever_listens
from ._tcp_meet import Hello, Secret, dial
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

__all__ = ["TcpEndpoint", "missing", "whoever_listens"]

_REGION = re.compile(r"g\d{1,18}", re.ASCII)
MOST_LOOPS = 4
"""Threads of one endpoint that move bytes."""
MAKE_WAY_SECONDS = 1.0
"""How long an endpoint that connects again may wait for the end of its link before."""
LINGER = 5.0
"""Seconds that ``close`` waits for peers to take what was sent."""


def missing() -> str:
    """See ``transport.base``: every host has sockets."""
    return ""


class TcpPeer(Peer):
    """``link`` leads there: made by ``connect``, or by the first answer to what came."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.where = TcpAddress.parse(address)
        self.lock = threading.Lock()
        self.link: int | None = None
        """The engine's number; it stays when the link has ended, until ``connect``."""
        self.incoming = 0
        """The engine's number of the link that leads from there; 0: none."""


class TcpRanges(OffsetRanges):
    """Keeps offsets and memory where native code reads them."""

    def __init__(self, peer: Peer, local: Slices, remote: Slices, region: int) -> None:
        super().__init__(peer, local, remote)
        assert isinstance(remote.region, RegionRef)
        self.native = _native.TcpRanges(
            self.source,
            self.source_offsets,
            region,
            remote.region.nbytes,
            self.target_offsets,
            self.length,
        )


class TcpEndpoint(Endpoint):
    """See ``Endpoint`` and the head of this module. Putting waits where 16,384 puts and messages,
    or 128 MiB of messages, are on their way to one peer.
    """

    capabilities = Capabilities(
        name="tcp",
        cross_process=True,
        cross_host=True,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        network = network or NetworkConfig()
        self.name = name
        self._streams = network.tcp_streams
        self._owner = os.getpid()
        self._secret = Secret(network.secret)
        self._closed = False
        self._lock = threading.Lock()
        self._registered = 0
        self._regions: dict[str, OwnRegion] = {}
        self._peers: dict[str, TcpPeer] = {}
        self._incoming: dict[int, TcpPeer] = {}
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Ticket, TcpRanges]] = {}
        """By the put's number; keeps its memory mapped."""
        listener, self._where = listen(network)
        self._engine = _native.TcpEngine(_loops(self._streams))
        self._acceptor = Acceptor(listener, self._where, self._secret, self._make_way, self._adopt)

    @property
    def dropped(self) -> int:
        """Connections that did not prove themselves, and links that broke the wire's rules."""
        return self._acceptor.refused + self._engine.malformed

    def address(self) -> str:
        return str(self._where)

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        buffer = allocate(memory) if isinstance(memory, int) else callers_memory(memory)
        self._registered += 1
        number = self._registered
        ref = RegionRef(self.address(), f"g{number}", buffer.nbytes)

        def take_back(region: OwnRegion) -> None:
            self._engine.remove_region(number)
            self._regions.pop(region.ref.name, None)

        self._engine.add_region(number, buffer)
        region = self._regions[ref.name] = OwnRegion(ref, buffer, take_back)
        return region

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        peer = self._peer(address)
        deadline = deadline_after(timeout)
        with self._told_about(peer), self._dialling(peer, deadline):
            if peer.link is not None and self._engine.problem(peer.link):
                self._engine.drop_outgoing(peer.link)
                peer.link = None
            if peer.link is None:
                self._dial(peer, deadline)
        return peer

    def _peer(self, address: str) -> TcpPeer:
        peer = self._peers.get(address) or TcpPeer(address)
        return self._peers.setdefault(address, peer)

    @contextmanager
    def _told_about(self, peer: Peer) -> Iterator[None]:
        """Errors that say between whom."""
        try:
            yield
        except TransportError as error:
            raise type(error)(f"{self.name} to {peer.address}: {error}") from error

    @contextmanager
    def _dialling(self, peer: TcpPeer, deadline: float) -> Iterator[None]:
        if not peer.lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError("another thread is still connecting")
        try:
            yield
        finally:
            peer.lock.release()

    def _dial(self, peer: TcpPeer, deadline: float) -> int:
        sockets = dial(self.address(), peer.where, self._streams, self._secret, deadline)
        link = self._engine.add_outgoing([sock.detach() for sock in sockets])
        self._check_open()
        peer.link = link
        return link

    def _link(self, peer: Peer, deadline: float) -> int:
        """The link there; dials where the peer was met only by what it sent."""
        assert isinstance(peer, TcpPeer)
        if peer.link is not None:
            return peer.link
        with self._dialling(peer, deadline):
            return peer.link if peer.link is not None else self._dial(peer, deadline)

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        peer = self._peers.get(address)
        # Links before this one were fenced when it came.
        if peer is not None and not self._engine.fence_incoming(peer.incoming, timeout):
            raise DeadlineError(f"{self.name}: the link from {address} has not ended")

    def _make_way(self, hello: Hello) -> None:
        """Before a proven connection is welcomed: what its endpoint put before it connected again
        must neither mix with what follows nor come after it. Runs in the acceptor's thread."""
        if hello.stream == 0:
            self.fence(hello.address, MAKE_WAY_SECONDS)

    def _adopt(self, hello: Hello, sock: socket.socket) -> bool:
        """A welcome connection; runs in the acceptor's thread."""
        with self._lock:
            peer = self._peer(hello.address)
            link = self._engine.add_incoming(hello.link, hello.stream == 0, sock.detach())
            if link:
                peer.incoming = link
                self._incoming[link] = peer
        return link != 0

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self.address(), peer, local, remote)
        assert isinstance(remote.region, RegionRef)
        ref = remote.region
        if not _REGION.fullmatch(ref.name):
            raise TransportError(f"region {ref.name} of {ref.address} is no region over tcp")
        number = int(ref.name[1:])
        ranges = TcpRanges(peer, local, remote, number)
        deadline = deadline_after(DEFAULT_TIMEOUT)
        try:
            link = self._link(peer, deadline)
            self._engine.query(link, number, ref.nbytes, seconds_left(deadline))
        except TransportError as error:
            raise type(error)(f"{peer.address}, region {ref.name}: {error}") from error
        return ranges

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        assert isinstance(ranges, TcpRanges)
        notice = checked_notice(notice)
        check_no_event(after)
        index = index_array(index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        check_region_open(ranges.region)
        deadline = deadline_after(timeout)
        with self._told_about(ranges.peer):
            link = self._link(ranges.peer, deadline)
            number, ticket = next(self._numbers), Ticket()
            # Before the put: another thread may poll its end before this one comes back.
            self._pending[number] = ticket, ranges
            try:
                left = seconds_left(deadline)
                self._engine.put(link, number, ranges.native, index, notice, left)
            except BaseException:
                self._pending.pop(number, None)
                raise
        return ticket

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        check_message(message, self.capabilities.max_message_bytes)
        deadline = deadline_after(timeout)
        with self._told_about(peer):
            link = self._link(peer, deadline)
            self._engine.send(link, message, seconds_left(deadline))

    def poll(self, timeout: float) -> Events:
        self._check_open()
        deadline = deadline_after(timeout)
        events = Events()
        while not events:
            left = seconds_left(deadline)
            arrived, finished = self._engine.poll(left)
            with self._lock:
                for link, content in arrived:
                    self._sort(link, content, events)
            events.tickets += [self._finish(*each) for each in finished]
            if left <= 0:
                break
        return events

    def _sort(self, link: int, content: int | bytes | None, events: Events) -> None:
        peer = self._incoming[link]
        if isinstance(content, int):
            events.notices.append((peer, content))
        elif content is not None:
            events.messages.append((peer, content))
        else:
            del self._incoming[link]
            if peer.incoming == link:
                peer.incoming = 0

    def _finish(self, number: int, late: bool, problem: str) -> Ticket:
        ticket, ranges = self._pending.pop(number)
        if problem:
            text = f"{self.name} to {ranges.peer.address}: {problem}"
            ticket.error = DeadlineError(text) if late else TransportError(text)
        ticket.done = True
        return ticket

    def close(self) -> None:
        if self._closed or is_forked(self._owner):
            return
        self._closed = True
        self._acceptor.stop()
        self._engine.close(LINGER)
        for region in list(self._regions.values()):
            region.close()
        for number in list(self._pending):
            self._finish(number, False, "the endpoint was closed")

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the endpoint {self.name} is closed")


def _loops(streams: int) -> int:
    """Threads that move bytes: half of the cores at most, as others compute."""
    return max(1, min(streams, MOST_LOOPS, len(os.sched_getaffinity(0)) // 2))
