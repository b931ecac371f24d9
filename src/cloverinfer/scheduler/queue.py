"""The waiting queue: by priority, then first come first served."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

T = TypeVar("T")
Order = tuple[int, int]
"""Priority (the lower the sooner) and order of arrival; no two requests have the same."""


class WaitingQueue(Generic[T]):
    """A request that was preempted keeps its order, and so goes before all who came after it."""

    def __init__(self) -> None:
        self._heap: list[Order] = []
        """Orders of all that wait, and of some that do so no more."""
        self._items: dict[Order, T] = {}
        self._due: dict[Order, float] = {}
        self._deadlines: list[tuple[float, Order]] = []
        """Of all that wait with one, and of some that do so no more."""

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[T]:
        return [self._items[order] for order in sorted(self._items)]

    def push(self, order: Order, item: T, deadline: float | None = None) -> None:
        assert order not in self._items, f"{order} waits already"
        self._items[order] = item
        heapq.heappush(self._heap, order)
        if deadline is not None:
            self._due[order] = deadline
            heapq.heappush(self._deadlines, (deadline, order))

    def head(self) -> T | None:
        while self._heap and self._heap[0] not in self._items:
            heapq.heappop(self._heap)
        return self._items[self._heap[0]] if self._heap else None

    def discard(self, order: Order) -> bool:
        """Takes one out, whether it waits or not; True where it did."""
        self._due.pop(order, None)
        return self._items.pop(order, None) is not None

    def next_deadline(self) -> float | None:
        """When the first of those that wait has waited too long."""
        while self._deadlines and self._due.get(self._deadlines[0][1]) != self._deadlines[0][0]:
            heapq.heappop(self._deadlines)  # it does not wait any more, or anew
        return self._deadlines[0][0] if self._deadlines else None

    def overdue(self, now: float) -> list[T]:
        """Those that have waited too long."""
        return [self._items[order] for order in sorted(self._due) if self._due[order] <= now]
