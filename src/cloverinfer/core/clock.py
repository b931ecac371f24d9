"""Time as a value that is passed in, so that schedulers can be driven by a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds; only differences mean anything."""

monotonic: Clock = time.monotonic


class ManualClock:
    """A clock that moves only when told; for tests and simulation."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        self.now += seconds
        return self.now
