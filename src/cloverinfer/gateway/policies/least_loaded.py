"""The one with the fewest requests to do."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Blocks, Candidate, Policy


class LeastLoaded(Policy):
    """Among equals each in its turn."""

    reads_blocks = False

    def pick(self, candidates: Sequence[Candidate], blocks: Blocks) -> Candidate:
        return self._least(candidates, lambda one: one.pressure)
