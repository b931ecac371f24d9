"""Leaves an instance alone that failed several times in a row, and tries it again by one request.

It knows no HTTP: what a fault is, its callers decide.
"""

from __future__ import annotations

from ..core.clock import Clock

CLOSED, OPEN, HALF_OPEN = "closed", "open", "half_open"


class Breaker:
    """Closed: all requests pass. Open: none. Half open: one passes, and decides."""

    def __init__(self, clock: Clock, faults: int, seconds: float) -> None:
        """Opens after ``faults`` in a row, for ``seconds``."""
        self._clock = clock
        self._most = faults
        self._seconds = seconds
        self._faults = 0
        self._until: float | None = None
        """When it may be tried again; None while it is closed."""
        self._trying = False

    @property
    def state(self) -> str:
        if self._until is None:
            return CLOSED
        return HALF_OPEN if self._clock() >= self._until else OPEN

    def allows(self) -> bool:
        """Whether a request may begin now."""
        return self.state == CLOSED or (self.state == HALF_OPEN and not self._trying)

    def begin(self) -> bool:
        """A request begins, which ends by one of the three below; returns whether it is the one
        that tries a half-open instance."""
        trying = self.state == HALF_OPEN and not self._trying
        self._trying = self._trying or trying
        return trying

    def success(self) -> None:
        """The instance answered, whichever request it was: it works."""
        self._faults, self._until, self._trying = 0, None, False

    def fault(self) -> None:
        """The instance failed. Of requests that began before it opened nothing new is learnt."""
        if self.state == OPEN:
            return
        self._faults += 1
        if self._until is not None or self._faults >= self._most:
            self._until, self._trying = self._clock() + self._seconds, False

    def abandon(self, trying: bool) -> None:
        """The request ended without a word about the instance: its client left. ``trying`` is what
        ``begin`` returned."""
        if trying:
            self._trying = False
