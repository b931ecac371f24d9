"""The client's end of an answer: nothing is sent before there is something to send.

Until then another attempt may still be made; after that an answer that breaks off says so, in a
form that never looks finished.
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

from ..server.errors import error_body
from .upstream import Answer


class Sink:
    """One answer of HTTP."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        """That of the answer, once its head is sent."""
        self._ended = False

    @property
    def started(self) -> bool:
        return self.status != 0

    async def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.started
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        if not self._ended:
            self._ended = True
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: Answer) -> None:
        length = (b"content-length", str(len(answer.body)).encode())
        await self.head(answer.status, [*answer.headers, length])
        self._ended = True
        await self._send({"type": "http.response.body", "body": answer.body, "more_body": False})

    async def error(self, status: int, body: dict[str, object], retry_after: str = "") -> None:
        """An error instead of an answer, or at the end of one that has begun."""
        data = msgspec.json.encode(body)
        if self.started:
            # The blank lines end whatever event was cut off in the middle.
            await self.piece(b"\n\ndata: " + data + b"\n\n")
            await self.end()
            return
        headers = [(b"content-type", b"application/json")]
        if retry_after:
            headers.append((b"retry-after", retry_after.encode()))
        await self.whole(Answer(status, headers, data))

    async def broken(self, reason: str) -> None:
        """The instance went while it answered."""
        await self.error(502, error_body(reason, "server_error", code="instance_lost"))
