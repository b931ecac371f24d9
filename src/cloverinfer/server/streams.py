"""Carries chunks from the engine to a client, and notices when the client is gone.

A stream is closed, which aborts its request, however the carrying ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any

import anyio
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.errors import EngineClosedError
from .engine import Chunk

DONE = b"data: [DONE]\n\n"


class ClientGoneError(Exception):
    """The client closed its connection; nobody is left to answer."""


def event(payload: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


Batch = list[tuple[int, Chunk]]
"""Chunks that came together, each with the index of its stream."""


async def fan_in(
    receive: Receive, streams: Sequence[AsyncGenerator[Chunk, None]], cut: asyncio.Event
) -> AsyncGenerator[Batch, None]:
    """Chunks of all streams as they come, all that are ready at once.

    Raises ``ClientGoneError`` as soon as the client disconnects, ``EngineClosedError`` once ``cut``
    is set, and whatever a stream raises.
    """
    mix = _Mix(len(streams))
    closed = EngineClosedError("the server is shutting down")
    tasks = [
        asyncio.ensure_future(mix.end_with(ClientGoneError(), _disconnect(receive))),
        asyncio.ensure_future(mix.end_with(closed, cut.wait())),
    ]
    tasks += [asyncio.ensure_future(mix.pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        while batch := await mix.batch():
            yield batch
    finally:
        await _end(tasks, streams)


class _Mix:
    """What several tasks bring for one reader: no task or wake-up is made per chunk that waits."""

    def __init__(self, streams: int) -> None:
        self._running = streams
        self._ready: Batch = []
        self._end: BaseException | None = None
        """Raised to the reader at once."""
        self._problem: BaseException | None = None
        """Raised to the reader after what came before it."""
        self._reader: asyncio.Future[None] | None = None

    async def pump(self, index: int, stream: AsyncGenerator[Chunk, None]) -> None:
        try:
            async for chunk in stream:
                self._ready.append((index, chunk))
                self._wake()
        except Exception as problem:
            self._problem = problem  # the reader's, whose request it is
        finally:
            self._running -= 1
            self._wake()

    async def end_with(self, end: Exception, event: Awaitable[Any]) -> None:
        await event
        self._end = self._end or end
        self._wake()

    async def batch(self) -> Batch:
        """What is ready; empty once all streams have ended."""
        while True:
            if self._end is not None:
                raise self._end
            if self._ready:
                ready, self._ready = self._ready, []
                return ready
            if self._problem is not None:
                raise self._problem
            if not self._running:
                return []
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def _disconnect(receive: Receive) -> None:
    """Returns when the client has closed its connection; the body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(
    tasks: Sequence[asyncio.Future[Any]], streams: Sequence[AsyncGenerator[Chunk, None]]
) -> None:
    # Shielded: a cancelled handler must still abort its requests.
    with anyio.CancelScope(shield=True):
        for task in tasks:
            task.cancel()
        # What these raise now concerns nobody: the answer has ended.
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


class EventStream(Response):
    """Sends server-sent events; closes their generator whatever happens on the way."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        try:
            await send(start)
            async for data in self.events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (ClientGoneError, OSError):
            return
        finally:
            with anyio.CancelScope(shield=True):
                await self.events.aclose()
