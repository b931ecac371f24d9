"""Who may compute, where several nodes share one process's cores.

Each node's kernels use all of the process's compute threads; the gate lets one node at a time use
them, first come first served, so that together they never run more threads than there are cores.
"""

from __future__ import annotations

from .. import _native
from .openmp import release_workers


class Gate:
    """A fair lock, which layer loops without Python take too. ``threading.Lock`` is not fair: a
    prefill between two layers would keep it."""

    def __init__(self) -> None:
        self.native: _native.Gate | None = _native.Gate()
        self._enter, self._leave = self.native.enter, self.native.leave

    def __enter__(self) -> None:
        self._enter()

    def __exit__(self, *_: object) -> None:
        self._leave()

    def rest(self) -> None:
        """Called by a node that will not compute for a while: its workers leave the cores."""
        release_workers()


class OpenGate:
    """For a node that has its process for itself."""

    native: _native.Gate | None = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None

    def rest(self) -> None:
        return None
