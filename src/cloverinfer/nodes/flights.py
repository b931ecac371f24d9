"""The steps that a node has launched and not reported, in order.

It launches what plans ask for as they come, and reports each step once the device is done with it:
a step that failed when it was launched too, after those before it. It does not wait for the device
but where the next step cannot be launched before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..wire.messages import StepPlan, StepStats
from .device_forward import DeviceForward
from .forward import Sampled
from .launched import Launched
from .rows import RowTable

OnDone = Callable[[StepPlan, Sampled, StepStats], None]
OnFailed = Callable[[StepPlan, Exception], None]


@dataclass(frozen=True)
class _Flight:
    plan: StepPlan
    step: Launched | Exception
    """Or why there is none."""
    stats: StepStats
    began: float

    @property
    def for_host(self) -> bool:
        """Nothing may be launched after it before it is taken."""
        return isinstance(self.step, Launched) and self.step.for_host

    @property
    def over(self) -> bool:
        return isinstance(self.step, Exception) or self.step.ready()


class Flights:
    """Used by the node's thread alone."""

    def __init__(
        self, forward: DeviceForward, rows: RowTable, on_done: OnDone, on_failed: OnFailed
    ) -> None:
        self._forward = forward
        self._rows = rows
        self._on_done, self._on_failed = on_done, on_failed
        self._flights: deque[_Flight] = deque()
        self._last_end = 0.0

    def __len__(self) -> int:
        return len(self._flights)

    def launch(self, plan: StepPlan) -> None:
        """The boundary where errors of launching stop."""
        if self._flights and self._flights[-1].for_host:
            self.finish()
        began, stats = time.perf_counter(), StepStats()
        step: Launched | Exception
        try:
            self._rows.apply(plan)
            batch = self._rows.batch(plan)
            step = self._forward.launch(batch, self._rows.take_changes())
            stats.dense = time.perf_counter() - began
            stats.attention_calls = self._forward.num_layers
        except Exception as problem:
            step = problem
            self._rows.void(plan)
        self._flights.append(_Flight(plan, step, stats, began))
        self.report()

    def report(self) -> None:
        """Reports what is over."""
        while self._flights and self._is_over(self._flights[0]):
            self._land()

    def finish(self) -> None:
        """Waits for all, and reports them."""
        while self._flights:
            self._land()

    def _is_over(self, flight: _Flight) -> bool:
        try:
            return flight.over
        except RuntimeError:
            return True  # the device failed, which taking the step will say

    def _land(self) -> None:
        """The boundary where errors of the oldest step stop."""
        flight = self._flights.popleft()
        try:
            if isinstance(flight.step, Exception):
                raise flight.step
            sampled = flight.step.take()
        except Exception as problem:
            if isinstance(flight.step, Launched):
                flight.step.void()
            self._on_failed(flight.plan, problem)
            return
        now = time.perf_counter()
        # A step that was launched ahead began when the one before it ended.
        flight.stats.seconds = now - max(flight.began, self._last_end)
        self._last_end = now
        self._on_done(flight.plan, sampled, flight.stats)
