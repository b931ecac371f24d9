"""Addresses of endpoints that meet over sockets (tcp, rdma), and the sockets that they listen at.
Knows no handshake."""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import socket
from dataclasses import dataclass

from ..config.network import NetworkConfig
from ..core.errors import TransportError

PORTS_TRIED = 64
"""From a configured port upwards: several nodes of one host share one configuration."""
_ADDRESS = re.compile(r"(tcp|rdma)://(\[[0-9a-fA-F:.%\w]+\]|[^\s:/\[\]]+):(\d{1,5})/([0-9a-f]{16})")
_WILDCARDS = ("0.0.0.0", "::")
ANYONE = "0" * 16
"""The incarnation of whoever listens; no endpoint has it."""
MOST_BYTES = 255
"""Length of the longest address, which travels in a field of fixed size."""


@dataclass(frozen=True)
class TcpAddress:
    """``tcp://host:port/incarnation``: a restart on the same port is another endpoint. ``scheme``
    is the transport's name."""

    host: str
    port: int
    incarnation: str
    scheme: str = "tcp"

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> TcpAddress:
        match = _ADDRESS.fullmatch(text)
        if match is None or len(text.encode()) > MOST_BYTES:
            raise TransportError(f"{text!r} is not the address of a tcp or rdma endpoint")
        return cls(match[2].strip("[]"), int(match[3]), match[4], match[1])


def whoever_listens(host: str, port: int) -> str:
    """An address that any endpoint at this place accepts. It is good for one message, to be told
    the endpoint's own address by the answer: regions and puts are for that."""
    return str(TcpAddress(host, port, ANYONE))


def listen(network: NetworkConfig, scheme: str = "tcp") -> tuple[socket.socket, TcpAddress]:
    """A listening socket and what peers are told; ``TransportError`` where there is no port."""
    last = network.port + PORTS_TRIED if network.port else 1
    for port in range(network.port, min(last, 65536)):
        listener = _listen_at(network.bind_host, port)
        if listener is not None:
            host = network.advertise_host or _own_host(network.bind_host, listener.family)
            bound: int = listener.getsockname()[1]
            address = TcpAddress(host, bound, secrets.token_hex(8), scheme)
            if len(str(address).encode()) > MOST_BYTES:
                listener.close()
                raise TransportError(f"network.advertise_host {host!r} is too long")
            return listener, address
    raise TransportError(
        f"ports {network.port} to {last - 1} of {network.bind_host} are taken; "
        "set network.port to another, or to 0 for a free one"
    )


def _listen_at(host: str, port: int) -> socket.socket | None:
    """None where the port is taken."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise TransportError(f"cannot listen at network.bind_host {host!r}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(where)
        listener.listen(256)
        listener.setblocking(False)
        return listener
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise TransportError(
            f"cannot listen at network.bind_host {host!r} port {port}: {error.strerror}"
        ) from error


def _own_host(bind_host: str, family: int) -> str:
    """``bind_host``, or an address of this host where that is every interface."""
    if bind_host not in _WILDCARDS:
        return bind_host
    # Connecting a datagram socket sends nothing; it picks the interface of the default route.
    far = "192.0.2.1" if family == socket.AF_INET else "2001:db8::1"
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((far, 9))
        return str(probe.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, family, socket.SOCK_STREAM)
        return str(found[0][4][0])
    return "127.0.0.1" if family == socket.AF_INET else "::1"
