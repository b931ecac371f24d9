"""Sends requests when they are due and keeps what came of them; the same for HTTP and in process.

It knows a ``Sender`` and a clock, both given, so that tests run it in simulated time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .records import Record, Sample
from .statistics import INTERRUPTED

Clock = Callable[[], float]
SPIN_SECONDS = 0.0005
"""Timers of event loops are a millisecond coarse: the rest of a wait is passed by yielding."""


class Sender(Protocol):
    """Runs one request to its end."""

    async def send(self, sample: Sample, record: Record, now: Clock) -> None:
        """Fills the record's times, tokens and end; a failure is told in it, never raised."""


@dataclass
class Run:
    """A run under way; ``records`` are there to be read however it ends."""

    sender: Sender
    limit: int | None = None
    """Most requests at a time; None: no limit."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set from outside: what is under way is cut off, nothing more is sent."""
    clock: Clock = time.perf_counter
    records: list[Record] = field(default_factory=list)
    running: int = 0
    _start: float = 0.0

    def now(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._start

    async def go(self, samples: Sequence[Sample], offsets: Sequence[float]) -> None:
        """Returns when all requests have ended, or ``stop`` was set."""
        self._start = self.clock()
        gate = asyncio.Semaphore(self.limit) if self.limit is not None else None
        stopped = asyncio.ensure_future(self.stop.wait())
        tasks: list[asyncio.Task[None]] = []
        feeder = asyncio.ensure_future(self._feed(samples, offsets, gate, tasks))
        try:
            await asyncio.wait({feeder, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self._cut_off([feeder, *tasks])

    async def _feed(
        self,
        samples: Sequence[Sample],
        offsets: Sequence[float],
        gate: asyncio.Semaphore | None,
        tasks: list[asyncio.Task[None]],
    ) -> None:
        for index, (sample, due) in enumerate(zip(samples, offsets, strict=True)):
            await self._wait_until(due)
            tasks.append(asyncio.ensure_future(self._one(index, sample, due, gate)))
        if tasks:
            await asyncio.wait(tasks)  # each has its own timeout

    async def _wait_until(self, due: float) -> None:
        left = due - self.now()
        if left > SPIN_SECONDS:
            await asyncio.sleep(left - SPIN_SECONDS)
        while self.now() < due:
            await asyncio.sleep(0)

    async def _one(
        self, index: int, sample: Sample, due: float, gate: asyncio.Semaphore | None
    ) -> None:
        record = Record(index, due, self.now(), prompt_tokens=sample.prompt_tokens)
        if gate is not None:
            await gate.acquire()
        record.sent = self.now()
        self.records.append(record)
        self.running += 1
        try:
            await self.sender.send(sample, record, self.now)
        except asyncio.CancelledError:
            record.error, record.ended = INTERRUPTED, self.now()
            raise
        finally:
            self.running -= 1
            if gate is not None:
                gate.release()

    async def _cut_off(self, tasks: Sequence[asyncio.Future[None]]) -> None:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result  # our own mistake: senders tell failures in the record
