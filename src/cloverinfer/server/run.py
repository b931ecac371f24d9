"""Listens: binds the socket, runs uvicorn, tells when it is ready and closes in order."""

from __future__ import annotations

import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from ..core.errors import ConfigError

GRACE = 10
"""Seconds that streams under way may go on after the server was told to stop."""


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; port 0 takes a free one.

    Bound before the engine starts, so that a taken port is told at once. ``ConfigError`` if not.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a host name"
        raise ConfigError(f"server.host: cannot resolve {host!r}: {reason}") from error
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"server.port: cannot listen on {host}:{port}: {error.strerror}"
        ) from error
    return sock


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()


def serve(
    app: FastAPI, sock: socket.socket, announce: Callable[[str], None], log_level: str = "warning"
) -> None:
    """Serves until SIGINT or SIGTERM, then lets what is under way finish within ``GRACE`` seconds.

    Announces ``ready: http://host:port`` once requests are taken. After an orderly end uvicorn
    raises the signal again, for whoever handled it before. The caller closes the engine.
    """
    config = uvicorn.Config(
        app, log_level=log_level, access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE
    )
    _Server(config, lambda: announce(f"ready: {url(sock)}")).run(sockets=[sock])
