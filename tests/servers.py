"""The server in a thread on a real socket, and small helpers for its answers."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import uvicorn

from cloverinfer.config import ServerConfig
from cloverinfer.server import run
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog


@contextlib.contextmanager
def serving(catalog: Catalog, settings: ServerConfig | None = None) -> Iterator[tuple[str, Any]]:
    """Address of a server and the uvicorn server itself."""
    servers: list[uvicorn.Server] = []
    begin = run._Server.startup

    async def remember(self: Any, sockets: Any = None) -> None:
        servers.append(self)
        await begin(self, sockets)

    ready: list[str] = []
    settings = settings or ServerConfig()
    sock = run.bind("127.0.0.1", 0)
    arguments = (build_app(catalog, settings), sock, settings, ready.append)
    thread = threading.Thread(target=run.serve, args=arguments)
    run._Server.startup = remember  # type: ignore[method-assign]
    try:
        thread.start()
        wait(lambda: bool(ready))
        yield ready[0].removeprefix("ready: "), servers[0]
    finally:
        run._Server.startup = begin  # type: ignore[method-assign]
        for server in servers:
            server.should_exit = True
        thread.join(60)
        sock.close()
    assert not thread.is_alive()


def wait(until: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.01)


def events(response: httpx.Response) -> list[Any]:
    """The payloads of a stream, the last of a whole one ``[DONE]``."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part]
    return [one if one == "[DONE]" else json.loads(one) for one in data]


def refused(response: httpx.Response, status: int, param: str | None, part: str) -> None:
    """An error of OpenAI's form."""
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param)
    assert part in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
