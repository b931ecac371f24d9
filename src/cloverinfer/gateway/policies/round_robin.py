"""Each in its turn, whatever it has to do."""

from __future__ import annotations

from collections.abc import Sequence

from .base import Blocks, Candidate, Policy


class RoundRobin(Policy):
    """The one whose last turn is the longest ago, so that comings and goings skip nobody."""

    reads_blocks = False

    def pick(self, candidates: Sequence[Candidate], blocks: Blocks) -> Candidate:
        return self._least(candidates, lambda one: 0.0)
