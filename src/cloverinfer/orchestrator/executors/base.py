"""The contract of an executor: it places nodes, starts them, tells of deaths, ends one that stands
still, and stops them all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from ...nodes.config import NodeConfig
from ...wire.messages import NodeInfo
from ..placement import Placement

OnDeath = Callable[[str, str], None]
"""(node's name, reason); called from any thread, at most once per node, not after ``stop``, and
only when nothing of the node runs any more: what it could write to may be given to others."""
Progress = Callable[[str], None]
"""Takes a line that says what is being waited for."""
STOP_SECONDS = 10.0
"""How long nodes may take to end by themselves before they are ended."""


class Executor(ABC):
    @abstractmethod
    def place(
        self, names: Mapping[str, Sequence[str]], room_timeout: float, progress: Progress
    ) -> Placement:
        """Where the nodes, whose names are given by role, will run; called once, before ``start``.

        Waits ``room_timeout`` seconds for hosts to offer room (``ClusterConfig``), then raises
        ``NodeStartError``. ``stop`` frees what this took.
        """

    @abstractmethod
    def start(
        self, configs: Sequence[NodeConfig], timeout: float, on_death: OnDeath, progress: Progress
    ) -> list[NodeInfo]:
        """Starts all nodes that were placed side by side and returns their infos in order.

        ``NodeStartError`` with the first node's name and reason where one cannot start or does not
        within ``timeout`` seconds; the others are stopped by then.
        """

    @abstractmethod
    def end(self, name: str, reason: str) -> None:
        """Ends a node that does not answer, at once and without waiting for it; its death is told
        of like any other, with this reason. A thread cannot be ended by others: it ends, and is
        told of, when it goes on by itself. One that is gone already is left alone."""

    @abstractmethod
    def stop(self) -> None:
        """Ends all nodes (who have been asked to over the wire already) and whatever ran them,
        and waits for it. Calling it twice is fine."""
