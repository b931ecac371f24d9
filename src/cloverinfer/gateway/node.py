"""Announces an instance for as long as it lives: what ``cloverinfer node`` runs beside it.

The orchestrator runs the same loop in its own process for instances that its settings name.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import aiohttp
import msgspec

from ..core.errors import CloverError
from .announcements import PATH
from .instances import Announcement, Withdrawal
from .probe import Probe
from .upstream import LOST, reason_of

log = logging.getLogger("cloverinfer.instances")
TIMEOUT = 5.0
"""Seconds that an orchestrator may take to hear of an instance."""

Deliver = Callable[[Announcement], Awaitable[None]]


async def watch(
    http: aiohttp.ClientSession, probe: Probe, deliver: Deliver, interval: float
) -> Announcement:
    """Asks and delivers every ``interval`` seconds until it is cancelled."""
    while True:
        await deliver(await probe.ask(http))
        await asyncio.sleep(interval)


class Herald:
    """Tells orchestrators over HTTP; says once when one is lost, and once when it is back, and the
    same of the instance itself."""

    def __init__(
        self, http: aiohttp.ClientSession, urls: Sequence[str], secret: str | None
    ) -> None:
        self._http = http
        self._urls = urls
        self._headers = {"Content-Type": "application/json"}
        if secret is not None:
            self._headers["Authorization"] = f"Bearer {secret}"
        self._state: dict[str, str] = {}
        self._sending: dict[str, asyncio.Future[None]] = {}
        self.last: Announcement | None = None
        """What was last told."""

    async def announce(self, told: Announcement) -> None:
        """To every orchestrator, without waiting: one that hangs must not keep the others from
        hearing. One that is still being told, or cannot be reached, hears the next one."""
        if self.last is None or self.last.problem != told.problem:
            if told.problem is not None:
                log.warning("the server takes no requests: %s", told.problem)
            elif self.last is not None:
                log.warning("the server takes requests again")
        self.last = told
        body = msgspec.json.encode(told)
        for url in self._urls:
            before = self._sending.get(url)
            if before is None or before.done():
                if before is not None:
                    before.result()
                self._sending[url] = asyncio.ensure_future(self._send("POST", url, body))

    async def withdraw(self) -> None:
        """Says that the instance goes, if anything was ever said."""
        for sending in self._sending.values():
            sending.cancel()
        await asyncio.gather(*self._sending.values(), return_exceptions=True)
        if self.last is not None:
            told = Withdrawal(url=self.last.url, incarnation=self.last.incarnation)
            body = msgspec.json.encode(told)
            await asyncio.gather(*(self._send("DELETE", url, body) for url in self._urls))

    async def _send(self, method: str, url: str, body: bytes) -> None:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT)
        try:
            async with self._http.request(
                method, url + PATH, data=body, headers=self._headers, timeout=timeout
            ) as response:
                text = await response.text()
                state = "heard" if response.status == 200 else f"{response.status} {text}"
        except LOST as error:
            state = reason_of(error)
        if self._state.get(url) != state:
            self._state[url] = state
            log.warning("%s: %s", url, state)


async def run_node(
    probe: Probe, urls: Sequence[str], secret: str | None, interval: float, stop: asyncio.Event
) -> None:
    """Announces the instance until ``stop`` is set, then withdraws it."""
    async with aiohttp.ClientSession() as http:
        herald = Herald(http, urls, secret)
        watching = asyncio.ensure_future(watch(http, probe, herald.announce, interval))
        stopping = asyncio.ensure_future(stop.wait())
        try:
            # Until a signal comes: what happens within has timeouts of its own.
            await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise CloverError("the instance is no longer watched") from watching.exception()
        finally:
            for task in (watching, stopping):
                task.cancel()
            await asyncio.gather(watching, stopping, return_exceptions=True)
            await herald.withdraw()
