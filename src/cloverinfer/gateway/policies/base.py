"""What every policy is: a choice among candidates, by their pressure and the prompt's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Candidate:
    """An instance that can take the request."""

    name: str
    pressure: float
    """Requests that it has to do."""


Blocks = Sequence[bytes]
"""Hashes of a prompt's blocks, each of all text up to its end."""


class Policy(ABC):
    """Chooses for one role. No I/O, no clock; the same calls make the same choices."""

    reads_blocks: ClassVar[bool]
    """Whether it needs the prompt's hashes; where not, nobody computes them."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._turn = 0

    @abstractmethod
    def pick(self, candidates: Sequence[Candidate], blocks: Blocks) -> Candidate:
        """One of the candidates, of which there is at least one. It counts as sent there."""

    def forget(self, name: str) -> None:
        """An instance went, or lost what it held."""
        self._turns.pop(name, None)

    def _least(
        self, candidates: Sequence[Candidate], cost: Callable[[Candidate], float]
    ) -> Candidate:
        """The cheapest; among equals the one whose last turn is the longest ago."""
        picked = min(candidates, key=lambda one: (cost(one), self._last_turn(one), one.name))
        self._turn += 1
        self._turns[picked.name] = self._turn
        return picked

    def _last_turn(self, candidate: Candidate) -> int:
        return self._turns.get(candidate.name, 0)
