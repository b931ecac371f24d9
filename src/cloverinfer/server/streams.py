"""Carries chunks from the engine to a client, and notices when the client is gone.

A stream is closed, which aborts its request, however the carrying ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
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


async def fan_in(
    receive: Receive, streams: Sequence[AsyncGenerator[Chunk, None]], cut: asyncio.Event
) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Chunks of all streams as they come, each with the index of its stream.

    Raises ``ClientGoneError`` as soon as the client disconnects, ``EngineClosedError`` once ``cut``
    is set, and whatever a stream raises.
    """
    gone = asyncio.ensure_future(_disconnect(receive))
    over = asyncio.ensure_future(cut.wait())
    pending: dict[asyncio.Future[Any], int] = {
        asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)
    }
    try:
        while pending:
            tasks = {gone, over, *pending}
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if gone in done:
                raise ClientGoneError
            if over in done:
                raise EngineClosedError("the server is shutting down")
            for task in done:
                index = pending.pop(task)
                try:
                    chunk = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(streams[index]))] = index
                yield index, chunk
    finally:
        await _end([gone, over, *pending], streams)


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
