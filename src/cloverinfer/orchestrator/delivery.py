"""Carries what an engine's thread hands out to an event loop, waking the loop once for many items.

A decode step ends with a token for every request of the batch; a wake-up for each of them would
cost more than the tokens. It knows loops and items, not requests.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Courier:
    """Delivers to the inboxes of one event loop. ``put`` may be called from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._underway: deque[tuple[Inbox, Any]] = deque()
        self._woken = False

    def put(self, inbox: Inbox, item: Any) -> None:
        """Raises ``RuntimeError`` where the loop has been closed: nobody will take the item."""
        if self._loop.is_closed():
            raise RuntimeError("the event loop is closed")
        # Appended before the flag is read, which _deliver clears before it drains: an item that
        # finds the flag set is seen by the delivery that is due.
        self._underway.append((inbox, item))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._woken = False
        underway = self._underway
        while underway:
            inbox, item = underway.popleft()
            inbox.take(item)


class Inbox:
    """Items for one reader, in order; everything but ``Courier.put`` happens on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None

    def take(self, item: Any) -> None:
        self._items.append(item)
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> Any:
        """The next item; waits as long as the engine takes, whose deadlines bound it."""
        while not self._items:
            self._reader = self._loop.create_future()
            await self._reader
        return self._items.popleft()


class Couriers:
    """One courier per event loop that is in use."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, Courier] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> Courier:
        courier = self._by_loop.get(loop)
        if courier is None:
            # Two threads that come here together may each make one: both work.
            courier = Courier(loop)
            alive = {one: its for one, its in self._by_loop.items() if not one.is_closed()}
            self._by_loop = {**alive, loop: courier}
        return courier
