"""Speaks HTTP to instances: one attempt at a time, and what its end says about the instance.

It knows nothing of policies or retries. Only faults of a server (no connection, a lost one, 5xx)
count against it; what a client did wrong does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from ..config import OrchestratorConfig
from ..core.request import QUEUE_TIMEOUT
from .instances import Instance
from .pulse import Pulse

KEEPALIVE = 2.0
"""Seconds that an idle connection is kept: fewer than any server keeps it, so that no request goes
into one that is being closed."""
LONGEST_ERROR = 1 << 20
"""Bytes of an answer that is an error."""
LOST = (aiohttp.ClientError, OSError, asyncio.TimeoutError)
"""What is raised where an instance cannot be reached, goes, or is silent."""
_DROPPED = frozenset({
    "connection", "content-encoding", "content-length", "date", "keep-alive", "server", "trailer",
    "transfer-encoding", "upgrade", "x-request-id",
})  # fmt: skip
"""Headers that are about one connection, or that the orchestrator writes itself."""


def reason_of(error: BaseException) -> str:
    """Why an instance is lost, in words for a log and for clients; of ``LOST``."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return f"cannot connect: {error.os_error.strerror or error.os_error}"
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        return "the connection was lost"
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class Answer:
    """A whole answer of an instance."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class AttemptError(Exception):
    """An attempt that may be made again elsewhere."""

    def __init__(self, instance: Instance, reason: str, answer: Answer | None = None) -> None:
        super().__init__(f"{instance.url}: {reason}")
        self.url = instance.url
        self.answer = answer
        """What the instance said, where it said something."""


class FaultError(AttemptError):
    """The instance failed."""


class HungError(FaultError):
    """The instance stands still, and may go on later."""


class BusyError(AttemptError):
    """The instance has too much to do (429, or it had no place in time): no fault of its own."""


class Attempt:
    """What became of one request to one instance."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._trying = instance.breaker.begin()
        self.result = "abandoned"

    def works(self) -> None:
        """The instance has answered, in part at least."""
        if self.result == "abandoned":
            self.result = "ok"
            self._instance.breaker.success()

    def fault(self) -> None:
        self.result = "fault"
        self._instance.breaker.fault()

    def close(self) -> None:
        if self.result == "abandoned":
            self._instance.breaker.abandon(self._trying)


class Upstream:
    """Connections to all instances."""

    def __init__(
        self, settings: OrchestratorConfig, on_end: Callable[[Instance, str], None]
    ) -> None:
        """Made on the running loop. ``on_end`` is told of each attempt's result."""
        self._on_end = on_end
        connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=KEEPALIVE)
        timeout = aiohttp.ClientTimeout(
            total=None, connect=settings.connect_timeout, sock_read=settings.answer_timeout
        )
        self._hang_timeout = settings.hang_timeout
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity", "User-Agent": "cloverinfer"},
        )
        self._pulse = Pulse(self._session, settings.hang_timeout)

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, instance: Instance, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[Attempt, aiohttp.ClientResponse]]:
        """An answer's head; leaving closes the connection, which cancels what is not over.

        Raises ``FaultError`` and ``BusyError``, also for what is raised within while it is read.
        """
        attempt = Attempt(instance)
        sent = {"Content-Type": "application/json", **headers}
        hung: asyncio.Future[None] | None = None
        try:
            with instance.busy(), self._pulse.of(instance) as hung:
                request = self._session.post(
                    instance.url + path, data=body, headers=sent, allow_redirects=False
                )
                async with await _unless(hung, request) as response:
                    hung.add_done_callback(lambda _: response.close())  # a reader hears of it
                    await _refuse(instance, attempt, response)
                    yield attempt, response
        except LOST as error:
            attempt.fault()
            if hung is not None and hung.done() and not hung.cancelled():
                reason = f"it stands still: no answer to /health for {self._hang_timeout:g} s"
                raise HungError(instance, reason) from error
            raise FaultError(instance, reason_of(error)) from error
        finally:
            attempt.close()
            self._on_end(instance, attempt.result)


async def _unless(
    hung: asyncio.Future[None], request: Awaitable[aiohttp.ClientResponse]
) -> aiohttp.ClientResponse:
    """The head of the answer; ``TimeoutError`` where the instance stands still before it."""
    asking = asyncio.ensure_future(request)
    head: aiohttp.ClientResponse | None = None
    try:
        # Bounded by the session's own timeouts.
        waited: set[asyncio.Future[Any]] = {asking, hung}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            raise asyncio.TimeoutError
        head = asking.result()
        return head
    finally:
        if head is None:
            asking.cancel()
            (late,) = await asyncio.gather(asking, return_exceptions=True)
            if isinstance(late, aiohttp.ClientResponse):
                late.close()


async def _refuse(instance: Instance, attempt: Attempt, response: aiohttp.ClientResponse) -> None:
    if response.status != 429 and response.status < 500:
        return
    answer = await whole(response, LONGEST_ERROR)
    if response.status == 429 or _had_no_place(answer):
        attempt.works()
        attempt.result = "busy"
        raise BusyError(instance, str(response.status), answer)
    attempt.fault()
    raise FaultError(instance, f"HTTP {response.status}", answer)


class _Problem(msgspec.Struct):
    code: str | int | None = None


class _Refused(msgspec.Struct):
    error: _Problem


def _had_no_place(answer: Answer) -> bool:
    if answer.status != 503:
        return False
    try:
        return msgspec.json.decode(answer.body, type=_Refused).error.code == QUEUE_TIMEOUT
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


async def whole(response: aiohttp.ClientResponse, most: int | None = None) -> Answer:
    """All of an answer; of one that is longer than ``most`` bytes the beginning."""
    body = b""
    if most is None:
        body = await response.read()
    else:
        async for piece in response.content.iter_any():
            body += piece
            if len(body) > most:
                break
    return Answer(response.status, passed(response), body[:most])


def passed(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """The headers that go on to the client."""
    return [
        (name.lower(), value) for name, value in response.raw_headers
        if name.decode("latin-1").lower() not in _DROPPED
    ]  # fmt: skip
