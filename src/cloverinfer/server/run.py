"""Listens: binds the socket, runs uvicorn, tells when it is ready and closes in order."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType
from typing import Literal

import uvicorn
from fastapi import FastAPI

from ..config import ServerConfig
from ..core.errors import ConfigError
from .door import Door
from .head import BoundedHead

GRACE = 2
"""Seconds that the last events may take to leave once all requests are over or cut off."""


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
            f"server.port: cannot listen on {host}:{port}: {error.strerror}; "
            "give another with --port (0 takes a free one)"
        ) from error
    return sock


def url(sock: socket.socket, scheme: str = "http") -> str:
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


class _Server(uvicorn.Server):
    """Drains before it stops: it listens on, refusing new requests, until those inside are done."""

    def __init__(self, config: uvicorn.Config, door: Door, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.door = door
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not passed on yet: uvicorn would stop to listen at once. It raises these again at the end.
        self._captured_signals.append(sig)
        self.door.drain()

    async def on_tick(self, counter: int) -> bool:
        over = await super().on_tick(counter)
        if over:
            self.door.drain()
        return over or self.door.drained()


def serve(
    app: FastAPI,
    sock: socket.socket,
    settings: ServerConfig,
    announce: Callable[[str], None],
    lifespan: Literal["on", "off"] = "off",
) -> None:
    """Serves until SIGINT or SIGTERM, then lets what is under way finish within
    ``settings.shutdown_timeout`` seconds; a second signal cuts that short.

    Announces ``ready: http://host:port`` once requests are taken. After an orderly end uvicorn
    raises the signal again, for whoever handled it before. The caller closes the engines.
    ``lifespan``: whether the application has something to start and end on the loop.
    """
    secure = settings.ssl_certfile is not None
    config = uvicorn.Config(
        app,
        log_level=settings.uvicorn_log_level,
        access_log=False,
        lifespan=lifespan,
        http=BoundedHead,
        root_path=settings.root_path,
        timeout_graceful_shutdown=GRACE,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
    )
    try:
        config.load()
    except OSError as error:
        raise ConfigError(f"server.ssl_certfile, server.ssl_keyfile: {error}") from error
    address = url(sock, "https" if secure else "http")
    _Server(config, app.state.door, lambda: announce(f"ready: {address}")).run(sockets=[sock])
