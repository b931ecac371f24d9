"""Lets others write into blocks only once this engine's device has done with them.

An engine gives blocks to a load while its device may still be computing steps that name them for
the request before: a step behind, or one begun in advance. What it does itself comes after that on
its stream; what peers write does not. Which blocks, and who writes, is not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...nodes.copies import Moment
from ...nodes.errands import Errands

PATIENCE = 600.0
"""Seconds for which the device may compute what it was asked for before."""
NAP = 200e-6
"""Seconds between two looks at the device: steps take longer, and the engine's thread computes."""


class Gate:
    """Does things in the order in which they are asked for, each after a moment of the device."""

    def __init__(self, mark: Callable[[], Moment], waits: bool) -> None:
        """``mark``: the moment at which all that the calling thread has asked for is done;
        ``waits``: whether that is ever later than now."""
        self._mark = mark
        self._errands = Errands("kv-gate") if waits else None

    def pass_on(self, act: Callable[[], None]) -> None:
        """From the engine's thread."""
        if self._errands is None:
            act()
            return
        moment = self._mark()

        def pass_then() -> None:
            moment.wait(PATIENCE, lambda: time.sleep(NAP))
            act()

        self._errands.ask(pass_then)

    def close(self) -> None:
        """What has not been done is dropped."""
        if self._errands is not None:
            self._errands.close()
