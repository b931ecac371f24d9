"""Peers of tcp endpoints that write and read frames by hand, to break every rule of the wire."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint
from cloverinfer.transport._tcp_accept import Acceptor
from cloverinfer.transport._tcp_address import TcpAddress, listen
from cloverinfer.transport._tcp_meet import Hello, Secret, dial
from cloverinfer.transport.tcp import TcpEndpoint
from tests.transport_kit import PATIENCE, Way, array, collect

HEADER = struct.Struct("<IIQQQQIIII")
RUN = struct.Struct("<QQ")
ANSWER = struct.Struct("<IIQ")
FRAME_MAGIC, ANSWER_MAGIC = 0x46564C43, 0x41564C43
PUT, MESSAGE, QUERY = 1, 2, 3
DONE, NO_REGION = 0, 1


@dataclass(frozen=True)
class Frame:
    """Plausible as it is; tests replace one field at a time."""

    magic: int = FRAME_MAGIC
    kind: int = PUT
    seq: int = 0
    total: int = 8
    offset: int = 0
    region: int = 1
    notice: int = 7
    nbytes: int = 8
    count: int | None = None
    """Of runs, where it is not their number."""
    reserved: int = 0
    runs: tuple[tuple[int, int], ...] = ((0, 8),)
    payload: bytes = b"\xff" * 8

    def pack(self) -> bytes:
        count = len(self.runs) if self.count is None else self.count
        head = HEADER.pack(
            self.magic,
            self.kind,
            self.seq,
            self.total,
            self.offset,
            self.region,
            self.notice,
            self.nbytes,
            count,
            self.reserved,
        )
        return head + b"".join(RUN.pack(*run) for run in self.runs) + self.payload


def message(text: bytes, **fields: int) -> Frame:
    frame = Frame(
        kind=MESSAGE,
        total=len(text),
        nbytes=len(text),
        region=0,
        notice=0,
        runs=(),
        payload=text,
    )
    return replace(frame, **fields)


def stranger_address() -> str:
    return str(TcpAddress("127.0.0.1", 9, secrets.token_hex(8)))


@contextlib.contextmanager
def link_to(
    endpoint: Endpoint, streams: int = 1, secret: str | None = None, mine: str = ""
) -> Iterator[list[socket.socket]]:
    """Blocking sockets of a link that the endpoint has accepted."""
    theirs = TcpAddress.parse(endpoint.address())
    until = time.monotonic() + PATIENCE
    opened = dial(mine or stranger_address(), theirs, streams, Secret(secret), until)
    for sock in opened:
        sock.settimeout(PATIENCE)
    try:
        yield opened
    finally:
        for sock in opened:
            sock.close()


def ended(sock: socket.socket) -> bool:
    """Whether the other side closes the connection before patience ends."""
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


class StrangeListener:
    """Accepts links like an endpoint, and leaves their sockets to the test."""

    def __init__(self, receive_buffer: int = 0) -> None:
        listener, self.where = listen(NetworkConfig())
        if receive_buffer:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sockets: list[socket.socket] = []
        self._came = threading.Condition()
        self._acceptor = Acceptor(
            listener, self.where, Secret(None), lambda hello: None, self._adopt
        )

    @property
    def address(self) -> str:
        return str(self.where)

    def _adopt(self, hello: Hello, sock: socket.socket) -> bool:
        with self._came:
            sock.settimeout(PATIENCE)
            self.sockets.append(sock)
            self._came.notify_all()
        return True

    def first(self) -> socket.socket:
        with self._came:
            assert self._came.wait_for(lambda: self.sockets, PATIENCE)
            return self.sockets[0]

    def close(self) -> None:
        self._acceptor.stop()
        for sock in self.sockets:
            sock.close()


Make = Callable[..., TcpEndpoint]


@contextlib.contextmanager
def endpoints() -> Iterator[Make]:
    """A maker of endpoints, by name and fields of ``NetworkConfig``, which all end with it."""
    made: list[TcpEndpoint] = []

    def create(name: str = "a", **fields: object) -> TcpEndpoint:
        made.append(TcpEndpoint(name, NetworkConfig(**fields)))  # type: ignore[arg-type]
        return made[-1]

    try:
        yield create
    finally:
        for endpoint in made:
            endpoint.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def serves(endpoint: TcpEndpoint, secret: str | None = None) -> None:
    """It still does all it should for a peer of good faith."""
    with contextlib.closing(TcpEndpoint("good", NetworkConfig(secret=secret))) as good:
        way = Way(good, endpoint, nbytes=100_000)
        array(way.source)[:] = 9
        way.put(3)
        good.send(way.peer, b"hello")
        seen = collect(endpoint, notices=1, messages=1)
        assert (seen.notices[-1][1], seen.messages[-1][1]) == (3, b"hello")
        way.expect(np.full(100_000, 9, np.uint8))
        way.target.close()
