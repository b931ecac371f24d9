"""A run in simulated time: sends are when the schedule and the limit allow, to the microsecond."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import pytest

from cloverinfer.bench.records import Record, Sample
from cloverinfer.bench.runner import Clock, Run
from cloverinfer.bench.statistics import INTERRUPTED, summarize


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Time stands still but where everybody sleeps; then it jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self.now = 0.0
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None) -> Any:
            if timeout is not None and timeout > 0:
                self.now += timeout
            else:
                self.now += 1e-6  # yielding takes a little, so that who spins gets on
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self.now


def simulate(main: Coroutine[Any, Any, Any], loop: SimulatedLoop) -> Any:
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


class Server:
    """Answers after ``first`` seconds with a token, then one every ``step``."""

    def __init__(self, first: float = 0.3, step: float = 0.1, tokens: int = 5) -> None:
        self.first, self.step, self.tokens = first, step, tokens

    async def send(self, sample: Sample, record: Record, now: Clock) -> None:
        await asyncio.sleep(self.first)
        for i in range(self.tokens):
            if i:
                await asyncio.sleep(self.step)
            record.times.append(now())
        record.output_tokens, record.ended = self.tokens, now()


def run(server: Any, offsets: list[float], limit: int | None = None) -> list[Record]:
    loop = SimulatedLoop()

    async def main() -> list[Record]:
        one = Run(server, limit, clock=loop.time)
        await one.go([Sample("x", 5)] * len(offsets), offsets)
        return one.records

    records: list[Record] = simulate(main(), loop)
    return sorted(records, key=lambda record: record.index)


def test_known_delays_are_what_is_measured() -> None:
    records = run(Server(), [0.0, 0.25, 1.0])
    assert [one.sent for one in records] == pytest.approx([0.0, 0.25, 1.0], abs=1e-3)
    for one in records:
        assert one.ttft == pytest.approx(0.3, abs=1e-3)
        assert one.tpot == pytest.approx(0.1, abs=1e-3)
        assert one.latency == pytest.approx(0.7, abs=1e-3)
    summary = summarize(records, slo={"ttft": 0.31, "tpot": 0.11})
    assert summary.good == 3
    assert summary.duration == pytest.approx(1.7, abs=1e-3)
    assert summary.notes == ["prompt tokens of 3 requests are not known and count as 0"]
    assert summarize(records, slo={"ttft": 0.29}).good == 0


def test_the_limit_holds_requests_back_and_says_so() -> None:
    records = run(Server(), [0.0] * 4, limit=2)
    assert [one.sent for one in records] == pytest.approx([0.0, 0.0, 0.7, 0.7], abs=1e-3)
    assert [one.ready for one in records] == pytest.approx([0.0] * 4, abs=1e-3)
    # Latency counts from the send: what the limit cost is told beside it.
    assert [one.latency for one in records] == pytest.approx([0.7] * 4, abs=1e-3)
    summary = summarize(records)
    assert summary.max_concurrency == 2
    assert summary.schedule["held"] == 2


def test_a_client_that_is_too_slow_is_found_out() -> None:
    loop = SimulatedLoop()

    class Slow(Server):
        async def send(self, sample: Sample, record: Record, now: Clock) -> None:
            loop.now += 0.2  # computes, while nobody else can run
            await super().send(sample, record, now)

    async def main() -> list[Record]:
        one = Run(Slow(), None, clock=loop.time)
        await one.go([Sample("x", 5)] * 10, [i * 0.05 for i in range(10)])
        return one.records

    summary = summarize(simulate(main(), loop))
    assert summary.schedule["lag_p99"] > 0.5
    assert any("could not keep its schedule" in note for note in summary.notes)


def test_stopping_keeps_what_there_is() -> None:
    loop = SimulatedLoop()

    async def main() -> list[Record]:
        one = Run(Server(), None, clock=loop.time)
        loop.call_later(0.8, one.stop.set)
        await one.go([Sample("x", 5)] * 3, [0.0, 0.5, 5.0])
        return one.records

    first, second = simulate(main(), loop)
    assert first.ok
    assert second.error == INTERRUPTED
    assert second.ended == pytest.approx(0.8, abs=1e-2)
    assert summarize([first, second]).interrupted == 1


def test_a_mistake_of_a_sender_is_not_swallowed() -> None:
    class Broken(Server):
        async def send(self, sample: Sample, record: Record, now: Clock) -> None:
            raise KeyError("ours")

    with pytest.raises(KeyError, match="ours"):
        run(Broken(), [0.0])
