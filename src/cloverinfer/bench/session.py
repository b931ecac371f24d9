"""One benchmark from warm-up to figures; Ctrl-C ends it early with the figures so far."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .plan import Plan
from .records import Record
from .runner import Run, Sender

T = TypeVar("T")
TELL_SECONDS = 10.0
"""Between two lines of progress where stderr is no terminal."""


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    records: list[Record]
    client_cpu: float | None
    """CPU seconds of this process per second of the run; None where it also computes."""
    interrupted: bool


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """``asyncio.run`` on the fastest loop there is."""
    try:
        import uvloop
    except ImportError:  # it has no build for this platform
        return asyncio.run(main)
    return uvloop.run(main)


async def measure(
    sender: Sender, plan: Plan, limit: int | None, warmups: int, quiet: bool
) -> Outcome:
    """Sends ``warmups`` requests that do not count, then the plan."""
    stop = asyncio.Event()
    with _ctrl_c(stop):
        await _warm_up(sender, plan, warmups, stop)
        run = Run(sender, limit, stop)
        wall, cpu = time.perf_counter(), time.process_time()
        told = asyncio.ensure_future(_tell(run, len(plan.samples), quiet))
        try:
            if not stop.is_set():
                await run.go(plan.samples, plan.offsets)
        finally:
            told.cancel()
            await asyncio.gather(told, return_exceptions=True)
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Outcome(run.records, cpu / max(wall, 1e-9), stop.is_set())


async def _warm_up(sender: Sender, plan: Plan, count: int, stop: asyncio.Event) -> None:
    samples = [plan.samples[i % len(plan.samples)] for i in range(count)]
    await Run(sender, None, stop).go(samples, [0.0] * count)


@contextlib.contextmanager
def _ctrl_c(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets ``stop``; a second one ends the process as it always does."""
    loop = asyncio.get_running_loop()

    def once() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    try:
        loop.add_signal_handler(signal.SIGINT, once)
    except (NotImplementedError, RuntimeError, ValueError):
        yield  # no such handlers here, or not the main thread: Ctrl-C ends the run without figures
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def _tell(run: Run, total: int, quiet: bool) -> None:
    """A line of progress on stderr each second; fewer where that is no terminal."""
    if quiet:
        return
    live = sys.stderr.isatty()
    started = time.perf_counter()
    try:
        while True:
            await asyncio.sleep(1.0 if live else TELL_SECONDS)
            seconds = time.perf_counter() - started
            line = f"{_progress(run.records)}, {run.running} running, of {total} in {seconds:.0f} s"
            print(f"\r{line:<78}" if live else line, end="" if live else "\n", file=sys.stderr)
            sys.stderr.flush()
    finally:
        if live:
            print(f"\r{'':<78}\r", end="", file=sys.stderr, flush=True)


def _progress(records: Sequence[Record]) -> str:
    ended = [one for one in records if one.ended]
    failed = sum(not one.ok for one in ended)
    return f"{len(ended) - failed} done, {failed} failed"
