"""Bounds the head of a request in bytes and time, which uvicorn's faster parser does not.

What has no whole head has not reached the front door: nobody has asked it for a key yet, so it
must not be able to take memory or connections. It knows nothing of what a head says.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 * 1024
"""Request line and headers that have come without being whole. One read of the socket, up to 256
KiB, may pass it."""
HEAD_SECONDS = 60.0
"""From a connection, or the first byte of a later request on it, to the end of the head."""
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


class BoundedHead(HttpToolsProtocol):
    """A connection of uvicorn's; closes those that go past the bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._came = 0
        self._deadline: asyncio.TimerHandle | None = None
        """Set while a head is waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._deadline is None:
            return
        self._came += len(data)
        if self._came > HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._end_wait()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._came = 0
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _end_wait(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # the answer to the request before it goes first
        else:
            self.transport.close()
