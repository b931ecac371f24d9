"""A transfer as decode sees it: who has claimed it, and who may still write into its blocks.

Values only; what happens to them is ``inbox``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...transport import Peer
from .courier import Wire
from .plan import LoadStart
from .wire import Claim, Drop, Worker


@dataclass
class Source:
    """One prefill worker that has greeted this one."""

    worker: Worker
    wire: Wire
    address: str
    """Of its end of the data wire."""
    heard: float
    """When something last came from it, by its wire's clock (``Wire.listened``)."""
    peer: Peer | None = None
    """Set once it has spoken over the data wire."""

    @property
    def name(self) -> str:
        return self.worker.name

    @property
    def silence(self) -> float:
        """Seconds for which it was listened to in vain."""
        return self.wire.listened - self.heard


@dataclass
class Claimed:
    """The attempt that a transfer is granted to, or will be."""

    attempt: int
    engine: str
    expected: list[str]
    """Names of all workers of that engine which send a share of the heads."""
    claims: dict[str, Claim] = field(default_factory=dict)
    """Those that have come, by worker."""
    slot: int = -1
    """Once granted."""
    number: int = -1
    granted: float = 0.0


@dataclass
class Incoming:
    start: LoadStart
    blocks: list[int]
    """In blocks of the grids."""
    deadline: float
    """Without a claim until then, loading fails."""
    claimed: Claimed | None = None
    leaving: dict[str, Drop] = field(default_factory=dict)
    """Workers that may still write, and what they were asked."""
    error: str = ""
    """Why it failed; reported once nobody may write any more."""
    aborted: bool = False

    @property
    def over(self) -> bool:
        return self.aborted or bool(self.error)
