"""What a node does once its device has come so far, in the order in which it was asked for.

The node's thread asks, and does it from its loop, which goes on serving what arrives meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from .copies import Moment

_AWAKE = 500e-6
"""Seconds for which the loop looks without a pause: most copies take no longer."""
_NAP = 100e-6
"""How long it then waits for what arrives between two looks."""


class Later:
    """Of one node, used by its thread alone."""

    def __init__(self) -> None:
        self._queue: deque[tuple[Moment, Callable[[], None]]] = deque()
        self._since = 0.0

    def after(self, moment: Moment, act: Callable[[], None]) -> None:
        """Calls ``act`` once ``moment`` has happened and all before it is done: at once, where that
        is so."""
        if not self._queue and moment.happened:
            act()
            return
        self._since = time.monotonic()
        self._queue.append((moment, act))

    def run(self) -> None:
        """Does what is due."""
        while self._queue and self._queue[0][0].happened:
            _, act = self._queue.popleft()
            act()

    def patience(self, timeout: float) -> float:
        """How long a poll may wait, of ``timeout`` seconds."""
        if not self._queue:
            return timeout
        awake = time.monotonic() - self._since < _AWAKE
        return 0.0 if awake else min(timeout, _NAP)
