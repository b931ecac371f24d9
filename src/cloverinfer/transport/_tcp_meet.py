"""How two tcp endpoints meet on a fresh connection: who is who, and that both know the secret.

    dialler   Hello      who dials, which incarnation it wants, a nonce
    listener  Challenge  its verdict so far, a nonce, its proof over both nonces
    dialler   proof      its own proof
    listener  Verdict

Proofs are HMAC-SHA256 keyed by the secret over everything said before and the side that speaks, so
that neither a recorded nor a reflected one is of use. They keep strangers out. They do not encrypt
what follows: that is for the network (a private one, or a tunnel).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass, replace
from enum import IntEnum

from ..core.errors import DeadlineError, RefusedError, TransportError
from ._shared import seconds_left
from ._tcp_address import MOST_BYTES, TcpAddress

VERSION = 1
"""Of the handshake and of frames; peers must have the same."""
_HELLO_MAGIC = b"CLVRHELO"
_CHALLENGE_MAGIC = b"CLVRCHAL"
_VERDICT_MAGIC = b"CLVRVERD"
_HELLO = struct.Struct(f"<8sIHH16s16s32s{MOST_BYTES + 1}p")
_CHALLENGE = struct.Struct("<8sII32s32s")
_VERDICT = struct.Struct("<8sI")
HELLO_BYTES, CHALLENGE_BYTES, PROOF_BYTES = _HELLO.size, _CHALLENGE.size, 32
MOST_STREAMS = 64
TRIES = 5
"""Of a connection whose listener ends it before its verdict."""
PAUSE = 0.05
"""Seconds between two of them."""


class _DroppedError(TransportError):
    """The listener ended the connection without a word."""


class Verdict(IntEnum):
    """What a listener thinks of a dialler. The first three fields of a hello and of a challenge
    stay where they are in every version."""

    WELCOME = 0
    VERSION = 1
    INCARNATION = 2
    SECRET = 3
    REFUSED = 4


_REASONS: dict[int, str] = {
    Verdict.VERSION: "it speaks another version of the wire: install the same CloverInfer on both",
    Verdict.INCARNATION: "the endpoint at this address has been restarted since",
    Verdict.SECRET: "it has another network.secret",
    Verdict.REFUSED: "it refused the connection",
}


@dataclass(frozen=True)
class Hello:
    """The dialler's first words."""

    version: int
    stream: int
    """Which connection of its link this is, from 0."""
    streams: int
    link: bytes
    """16 random bytes that its connections have in common."""
    incarnation: str
    """Of the endpoint that it wants."""
    nonce: bytes
    address: str
    """Of the endpoint that dials."""

    def pack(self) -> bytes:
        return _HELLO.pack(
            _HELLO_MAGIC,
            self.version,
            self.stream,
            self.streams,
            self.link,
            self.incarnation.encode(),
            self.nonce,
            self.address.encode(),
        )

    @classmethod
    def unpack(cls, data: bytes) -> Hello:
        """``TransportError`` for what is no hello."""
        magic, version, stream, streams, link, incarnation, nonce, address = _HELLO.unpack(data)
        hello = cls(
            version,
            stream,
            streams,
            link,
            incarnation.decode("ascii", "replace"),
            nonce,
            address.decode("utf-8", "replace"),
        )
        if magic != _HELLO_MAGIC:
            raise TransportError("it does not begin like a CloverInfer endpoint")
        if version == VERSION:
            TcpAddress.parse(hello.address)
            if not stream < streams <= MOST_STREAMS:
                raise TransportError("its hello contradicts itself")
        return hello


class Secret:
    """Makes and checks proofs."""

    def __init__(self, secret: str | None) -> None:
        self._key = (secret or "").encode()

    def proof(self, side: bytes, hello: bytes, nonce: bytes) -> bytes:
        return hmac.new(self._key, side + hello + nonce, hashlib.sha256).digest()

    def proves(self, proof: bytes, side: bytes, hello: bytes, nonce: bytes) -> bool:
        return hmac.compare_digest(proof, self.proof(side, hello, nonce))


LISTENER, DIALLER = b"listener", b"dialler"


def challenge(verdict: Verdict, nonce: bytes, proof: bytes) -> bytes:
    return _CHALLENGE.pack(_CHALLENGE_MAGIC, VERSION, verdict, nonce, proof)


def verdict(value: Verdict) -> bytes:
    return _VERDICT.pack(_VERDICT_MAGIC, value)


def dial(
    mine: str, theirs: TcpAddress, streams: int, secret: Secret, deadline: float
) -> list[socket.socket]:
    """The connections of a new link, which the endpoint at ``theirs`` has accepted; their sockets
    do not block. ``TransportError`` says why there are none, ``RefusedError`` where trying again
    is of no use.
    """
    link = secrets.token_bytes(16)
    opened: list[socket.socket] = []
    try:
        for stream in range(streams):
            hello = Hello(
                VERSION,
                stream,
                streams,
                link,
                theirs.incarnation,
                secrets.token_bytes(32),
                mine,
            )
            opened.append(_meet(theirs, hello, secret, deadline))
    except TimeoutError as error:
        _close_all(opened)
        raise DeadlineError("it did not answer in time") from error
    except (OSError, TransportError) as error:
        _close_all(opened)
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        kind = RefusedError if isinstance(error, RefusedError) else TransportError
        raise kind(f"no connection: {reason}") from error
    return opened


def _meet(theirs: TcpAddress, hello: Hello, secret: Secret, deadline: float) -> socket.socket:
    """One connection that the listener has accepted. Where strangers crowd at the port, a listener
    lets also those go who mean well; they come again."""
    for left in reversed(range(TRIES)):
        sock = _connect(theirs, deadline)
        try:
            said = replace(hello, nonce=secrets.token_bytes(32)).pack()
            _introduce(sock, said, secret, deadline)
            prepare_socket(sock)
            return sock
        except (ConnectionError, _DroppedError):
            sock.close()
            if not left:
                raise
            time.sleep(min(PAUSE, seconds_left(deadline)))
        except BaseException:
            sock.close()
            raise
    raise AssertionError("the last try returns or raises")


def _connect(theirs: TcpAddress, deadline: float) -> socket.socket:
    return socket.create_connection((theirs.host, theirs.port), timeout=_left(deadline))


def _left(deadline: float) -> float:
    left = seconds_left(deadline)
    if left <= 0:
        raise TimeoutError
    return left


def _introduce(sock: socket.socket, hello: bytes, secret: Secret, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(hello)
    magic, _, said, nonce, proof = _CHALLENGE.unpack(_exactly(sock, CHALLENGE_BYTES, deadline))
    if magic != _CHALLENGE_MAGIC:
        raise TransportError("what listens there is no CloverInfer endpoint")
    _check(said)
    if not secret.proves(proof, LISTENER, hello, nonce):
        raise RefusedError(_REASONS[Verdict.SECRET])
    sock.sendall(secret.proof(DIALLER, hello, nonce))
    magic, said = _VERDICT.unpack(_exactly(sock, _VERDICT.size, deadline))
    if magic != _VERDICT_MAGIC:
        raise TransportError("what listens there is no CloverInfer endpoint")
    _check(said)


def _check(said: int) -> None:
    if said in (Verdict.VERSION, Verdict.SECRET):
        raise RefusedError(_REASONS[said])
    if said != Verdict.WELCOME:
        raise TransportError(_REASONS.get(said, _REASONS[Verdict.REFUSED]))


def _exactly(sock: socket.socket, count: int, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        sock.settimeout(_left(deadline))
        part = sock.recv(count - len(data))
        if not part:
            raise _DroppedError("it closed the connection")
        data += part
    return data


def prepare_socket(sock: socket.socket) -> None:
    """What both ends set once a connection is accepted."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that vanished without a word is noticed within two minutes, also where nothing is sent.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _close_all(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
