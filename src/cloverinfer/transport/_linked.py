"""Endpoints of links: what transports share that meet over sockets and move bytes natively.

Each direction between two endpoints is a link, which the sender dials and the engine of its
transport then owns. Here are the endpoint's peers and regions, who may dial, and which ticket is
whose. What a link is made of, and how bytes travel, is the engine's; what notices and messages mean
is not known here.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ._shared import (
    OffsetRanges,
    OwnRegion,
    allocate,
    callers_memory,
    check_message,
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
from ._tcp_address import TcpAddress, listen
from ._tcp_meet import Hello, Secret, dial
from .base import (
    DEFAULT_TIMEOUT,
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

_REGION = re.compile(r"g\d{1,18}", re.ASCII)
MAKE_WAY_SECONDS = 1.0
"""How long an endpoint that connects again may wait for the end of its link before."""
LINGER = 5.0
"""Seconds that ``close`` waits for peers to take what was sent."""


class LinkPeer(Peer):
    """``link`` leads there: made by ``connect``, or by the first answer to what came."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.where = TcpAddress.parse(address)
        self.lock = threading.Lock()
        self.link: int | None = None
        """The engine's number; it stays when the link has ended, until another is made."""
        self.incoming = 0
        """The engine's number of the link that leads from there; 0: none."""
        self.fences = 0
        """Times that it was fenced."""


class LinkRanges(OffsetRanges):
    """``native``: what the engine calls these ranges."""

    native: Any


class Engine(Protocol):
    """A native engine, as far as it is the same for every transport."""

    @property
    def malformed(self) -> int: ...
    def add_region(self, number: int, memory: memoryview) -> None: ...
    def remove_region(self, number: int) -> None: ...
    def drop_outgoing(self, link: int) -> None: ...
    def problem(self, link: int) -> str: ...
    def query(self, link: int, region: int, nbytes: int, timeout: float) -> None: ...
    def put(
        self,
        link: int,
        number: int,
        ranges: Any,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float,
    ) -> None: ...
    def send(self, link: int, message: bytes, timeout: float) -> None: ...
    def poll(
        self, timeout: float
    ) -> tuple[list[tuple[int, int | bytes | None]], list[tuple[int, bool, str]]]: ...
    def close(self, timeout: float) -> None: ...


class LinkedEndpoint(Endpoint):
    """See ``Endpoint`` and the head of this module; ``streams``: connections that a link dials.
    Putting waits where 16,384 puts and messages, or 128 MiB of messages, are on their way to one
    peer.
    """

    _engine: Engine

    def __init__(self, name: str, network: NetworkConfig, streams: int) -> None:
        self.name = name
        self._streams = streams
        self._owner = os.getpid()
        self._secret = Secret(network.secret)
        self._closed = False
        self._lock = threading.Lock()
        self._registered = 0
        self._regions: dict[str, OwnRegion] = {}
        self._peers: dict[str, LinkPeer] = {}
        self._incoming: dict[int, LinkPeer] = {}
        self._fences_before = 0
        """Fences of the peer whose connection is made welcome just now."""
        self._numbers = itertools.count(1)
        self._pending: dict[int, tuple[Ticket, LinkRanges]] = {}
        """By the put's number; keeps its memory mapped."""
        self._start(network)
        listener, self._where = listen(network, self.capabilities.name)
        self._acceptor = Acceptor(listener, self._where, self._secret, self._make_way, self._adopt)

    @abstractmethod
    def _start(self, network: NetworkConfig) -> None:
        """Makes ``_engine``, before anybody can dial."""

    @abstractmethod
    def _add_outgoing(self, sockets: list[int], deadline: float) -> int:
        """Gives the sockets of a new link to the engine; the link's number."""

    @abstractmethod
    def _add_incoming(self, hello: Hello, sock: int) -> int:
        """The same for one that leads here; 0: it is of no use."""

    @abstractmethod
    def _fence(self, link: int, timeout: float) -> bool:
        """Ends a link that leads here; whether nothing is written for it any more."""

    @abstractmethod
    def _make_ranges(self, peer: Peer, local: Slices, remote: Slices, region: int) -> LinkRanges:
        """Ranges that the engine takes; ``region`` is the peer's number of its own."""

    @abstractmethod
    def _await(self, after: int | None, deadline: float) -> None:
        """Returns once a device's event has happened; ``ValueError`` where it knows none."""

    @property
    def dropped(self) -> int:
        """Connections that did not prove themselves, and links that broke the wire's rules."""
        return self._acceptor.refused + self._engine.malformed

    def address(self) -> str:
        return str(self._where)

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        buffer = allocate(memory) if isinstance(memory, int) else callers_memory(memory)
        return self._keep(
            buffer.nbytes, buffer, lambda number: self._engine.add_region(number, buffer)
        )

    def _keep(self, nbytes: int, buffer: memoryview, add: Callable[[int], None]) -> OwnRegion:
        """A region that ``add`` gives to the engine by its number."""
        self._registered += 1
        number = self._registered
        ref = RegionRef(self.address(), f"g{number}", nbytes)

        def take_back(region: OwnRegion) -> None:
            self._engine.remove_region(number)
            self._regions.pop(region.ref.name, None)

        add(number)
        region = self._regions[ref.name] = OwnRegion(ref, buffer, take_back)
        return region

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        peer = self._peer(address)
        deadline = deadline_after(timeout)
        try:
            with self._dialling(peer, deadline):
                if peer.link is not None and self._engine.problem(peer.link):
                    self._engine.drop_outgoing(peer.link)
                    peer.link = None
                if peer.link is None:
                    self._dial(peer, deadline)
        except TransportError as error:
            raise self._about(peer, error) from error
        return peer

    def _peer(self, address: str) -> LinkPeer:
        peer = self._peers.get(address) or LinkPeer(address)
        if peer.where.scheme != self.capabilities.name:
            raise TransportError(
                f"{address!r} is not the address of a {self.capabilities.name} endpoint"
            )
        return self._peers.setdefault(address, peer)

    def _about(self, peer: Peer, error: TransportError) -> TransportError:
        """The error, saying between whom."""
        return type(error)(f"{self.name} to {peer.address}: {error}")

    @contextmanager
    def _dialling(self, peer: LinkPeer, deadline: float) -> Iterator[None]:
        if not peer.lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError("another thread is still connecting")
        try:
            yield
        finally:
            peer.lock.release()

    def _dial(self, peer: LinkPeer, deadline: float) -> int:
        sockets = dial(self.address(), peer.where, self._streams, self._secret, deadline)
        link = self._add_outgoing([sock.detach() for sock in sockets], deadline)
        self._check_open()
        peer.link = link
        return link

    def _link(self, peer: Peer, deadline: float) -> int:
        """The link there; dials where the peer was met only by what it sent."""
        assert isinstance(peer, LinkPeer)
        if peer.link is not None:
            return peer.link
        with self._dialling(peer, deadline):
            return peer.link if peer.link is not None else self._dial(peer, deadline)

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        with self._lock:  # after it a link is either known here or refused by `_adopt`
            peer = self._peers.get(address)
            if peer is None:
                return
            peer.fences += 1
            link = peer.incoming
        # Links before this one were fenced when it came.
        if not self._fence(link, timeout):
            raise DeadlineError(f"{self.name}: the link from {address} has not ended")

    def _make_way(self, hello: Hello) -> None:
        """Before a proven connection is welcomed: what its endpoint put before it connected again
        must neither mix with what follows nor come after it. Runs in the acceptor's thread."""
        if hello.stream == 0:
            self.fence(hello.address, MAKE_WAY_SECONDS)
        with self._lock:
            self._fences_before = self._peer(hello.address).fences

    def _adopt(self, hello: Hello, sock: socket.socket) -> bool:
        """A welcome connection, unless its endpoint was fenced since: it may have put already. Runs
        in the acceptor's thread, right after ``_make_way``."""
        with self._lock:
            peer = self._peer(hello.address)
            if peer.fences != self._fences_before:
                sock.close()
                return False
            link = self._add_incoming(hello, sock.detach())
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
            raise TransportError(f"region {ref.name} of {ref.address} is no region here")
        number = int(ref.name[1:])
        ranges = self._make_ranges(peer, local, remote, number)
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
        assert isinstance(ranges, LinkRanges)
        notice = checked_notice(notice)
        index = index_array(index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        check_region_open(ranges.region)
        deadline = deadline_after(timeout)
        if after is not None:
            self._await(after, deadline)
        number, ticket = next(self._numbers), Ticket()
        try:
            link = self._link(ranges.peer, deadline)
            # Before the put: another thread may poll its end before this one comes back.
            self._pending[number] = ticket, ranges
            left = seconds_left(deadline)
            self._engine.put(link, number, ranges.native, index, notice, left)
        except TransportError as error:
            self._pending.pop(number, None)
            raise self._about(ranges.peer, error) from error
        except BaseException:
            self._pending.pop(number, None)
            raise
        return ticket

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        check_message(message, self.capabilities.max_message_bytes)
        deadline = deadline_after(timeout)
        try:
            self._engine.send(self._link(peer, deadline), message, seconds_left(deadline))
        except TransportError as error:
            raise self._about(peer, error) from error

    def poll(self, timeout: float) -> Events:
        self._check_open()
        deadline = deadline_after(timeout)
        left = timeout
        while True:
            arrived, finished = self._engine.poll(left)
            events = Events()
            if arrived:
                with self._lock:
                    for link, content in arrived:
                        self._sort(link, content, events)
            for number, late, problem in finished:
                events.tickets.append(self._finish(number, late, problem))
            if events or left <= 0:
                return events
            left = seconds_left(deadline)

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
