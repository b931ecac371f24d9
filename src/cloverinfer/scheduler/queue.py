"""The waiting queue: first come first served, those that were preempted before all others."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class WaitingQueue(Generic[T]):
    """Who was preempted came before everybody who was never admitted, as admission keeps the
    order of arrival; so the preempted ones, few, are kept sorted in front of the others.
    """

    def __init__(self) -> None:
        self._back: list[int] = []
        """Orders of arrival of preempted ones, rising."""
        self._preempted: dict[int, T] = {}
        self._fresh: OrderedDict[int, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._fresh)

    def items(self) -> list[T]:
        return [self._preempted[order] for order in self._back] + list(self._fresh.values())

    def push(self, number: int, item: T) -> None:
        self._fresh[number] = item

    def push_front(self, order: int, item: T) -> None:
        insort(self._back, order)
        self._preempted[order] = item

    def head(self) -> T | None:
        if self._back:
            return self._preempted[self._back[0]]
        return next(iter(self._fresh.values()), None)

    def discard(self, number: int, order: int) -> bool:
        """Takes one out, whether it waits or not; True where it did."""
        if order in self._preempted:
            del self._preempted[order]
            del self._back[bisect_left(self._back, order)]
            return True
        return self._fresh.pop(number, None) is not None
