"""The one that was sent the same beginning before, unless it has too much to do.

It remembers what was sent where, not what an instance still holds: a guess that costs a prefill
where it is wrong, and never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from .base import Blocks, Candidate, Policy

WORTH = 4.0
"""Requests that an instance may have to do beyond another and still be chosen because the whole
prompt was sent there before; half of the prompt is worth half of them."""
MOST_BLOCKS = 1 << 16
"""Hashes remembered per instance; the longest unused go first."""


class PrefixAware(Policy):
    """Pressure less what the shared beginning is worth."""

    reads_blocks = True

    def __init__(self) -> None:
        super().__init__()
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def pick(self, candidates: Sequence[Candidate], blocks: Blocks) -> Candidate:
        def cost(one: Candidate) -> float:
            return one.pressure - WORTH * self._share(one.name, blocks)

        picked = self._least(candidates, cost)
        self._remember(picked.name, blocks)
        return picked

    def forget(self, name: str) -> None:
        super().forget(name)
        self._held.pop(name, None)

    def _share(self, name: str, blocks: Blocks) -> float:
        """The part of the prompt, 0 to 1, that begins as something sent there."""
        held = self._held.get(name, ())
        same = next((i for i, block in enumerate(blocks) if block not in held), len(blocks))
        return same / len(blocks) if blocks else 0.0

    def _remember(self, name: str, blocks: Blocks) -> None:
        held = self._held.setdefault(name, OrderedDict())
        # The last first: the beginning, without which the rest is no use, is the longest kept.
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > MOST_BLOCKS:
            held.popitem(last=False)
