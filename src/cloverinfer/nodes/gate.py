"""Who may compute, where several nodes share one process's cores.

Each node's kernels use all of the process's compute threads; the gate lets one node at a time use
them, first come first served, so that together they never run more threads than there are cores.
"""

from __future__ import annotations

import threading
from collections import deque

from .openmp import release_workers


class Gate:
    """A fair lock. ``threading.Lock`` is not: a prefill between two layers would keep it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._mutex:
            if not self._held:
                self._held = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # released by whoever hands the gate over

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False

    def rest(self) -> None:
        """Called by a node that will not compute for a while: its workers leave the cores."""
        release_workers()


class OpenGate:
    """For a node that has its process for itself."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def rest(self) -> None:
        return None
