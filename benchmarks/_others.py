"""What other programs took of the processor while something was measured: a core that others use
halves a figure, and the load average of the minutes before does not tell.

It reads Linux's counters; elsewhere nothing is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")
NOTABLE = 0.05
"""A share of the cores that makes a figure doubtful."""


class Cores:
    """The processor's time up to now: all that was used, and what some processes used of it."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = sorted({os.getpid(), *pids})
        self.busy, self.idle = _all_cores()
        self.own = sum(map(_seconds_of, self._pids))

    def share_of_others(self) -> float | None:
        """Of the cores' time since this was made, what other processes took; None: unknown."""
        now = Cores(self._pids)
        busy, idle = now.busy - self.busy, now.idle - self.idle
        if busy + idle <= 0:
            return None
        return max(0.0, busy - (now.own - self.own)) / (busy + idle)


def doubt(share: float | None) -> str:
    """A warning for the reader; empty where there is no reason."""
    if share is None or share < NOTABLE:
        return ""
    return f"warning: other programs took {share:.0%} of the cores meanwhile: measure again"


def _all_cores() -> tuple[float, float]:
    """Seconds in which cores were busy, and idle."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0, 0.0
    user, nice, system, idle, iowait, irq, softirq, steal = (
        int(ticks) / TICKS for ticks in stat.read_text().split("\n", 1)[0].split()[1:9]
    )
    return user + nice + system + irq + softirq + steal, idle + iowait


def _seconds_of(pid: int) -> float:
    """Processor time of a process, 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS
