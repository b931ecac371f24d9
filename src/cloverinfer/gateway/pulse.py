"""Finds instances that stand still (stopped, hung, their host gone) while they have requests.

An instance may be silent for long and work all the same, so its silence is no fault: it is asked
for ``/health`` beside its requests, and any answer in time is a sign of life. Who hears of one that
gave none for too long ends its requests; that is not done here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import aiohttp

from .instances import Instance

PAUSES = 3
"""Between questions, within the time that an instance has to answer one of them."""


@dataclass
class _Watched:
    asking: asyncio.Future[None]
    requests: set[asyncio.Future[None]] = field(default_factory=set)


class Pulse:
    """Asks each instance once at a time, however many requests it has."""

    def __init__(self, http: aiohttp.ClientSession, timeout: float) -> None:
        """``timeout``: seconds without an answer after which an instance stands still."""
        self._http = http
        self._timeout = timeout
        self._watched: dict[str, _Watched] = {}

    @contextmanager
    def of(self, instance: Instance) -> Iterator[asyncio.Future[None]]:
        """For the length of a request: done once the instance stands still."""
        url = instance.url
        stands_still: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        watched = self._watched.get(url)
        if watched is None:
            asking = asyncio.ensure_future(self._ask(url))
            watched = self._watched[url] = _Watched(asking)
        watched.requests.add(stands_still)
        try:
            yield stands_still
        finally:
            stands_still.cancel()
            watched.requests.discard(stands_still)
            if not watched.requests and self._watched.get(url) is watched:
                del self._watched[url]
                watched.asking.cancel()

    async def _ask(self, url: str) -> None:
        """Until the instance stands still, or nobody listens any more."""
        pause = self._timeout / PAUSES
        until = time.monotonic() + self._timeout
        while time.monotonic() < until:
            await asyncio.sleep(pause)
            # A pause at least: where this process itself stood still the time may be over.
            if await self._answers(url, max(until - time.monotonic(), pause)):
                until = time.monotonic() + self._timeout
        for one in self._watched.pop(url).requests:
            if not one.done():
                one.set_result(None)

    async def _answers(self, url: str, seconds: float) -> bool:
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._http.get(f"{url}/health", timeout=timeout, allow_redirects=False):
                return True
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False
