"""A transfer as decode sees it: who has claimed it, and who may still write into its blocks.

Values and their rules; what happens to them is ``inbox``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...nodes.copies import Moment
from ...transport import Peer
from ...wire.messages import KVChunk
from ...wire.notices import CHUNK_MASK, KVNotice
from .courier import Wire
from .plan import LoadStart
from .staged import Landing
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
    reaches: bool = False
    """It was lost and can write here all the same, and the log says so."""

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
    storing: int = 0
    """Copies from host memory into its blocks that may be under way."""

    @property
    def over(self) -> bool:
        return self.aborted or bool(self.error)


@dataclass
class Landed:
    """Where blocks of one grant land in host memory, until nobody writes there any more."""

    landing: Landing
    incoming: Incoming
    claimed: Claimed
    blocks: list[int]
    """Of the landing, one for each of the transfer's."""
    chunks: dict[str, list[KVChunk]] = field(default_factory=dict)
    """As announced, by source."""
    seen: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many of them have come, by source and layer."""

    @property
    def current(self) -> bool:
        """The transfer is this grant's."""
        return self.incoming.claimed is self.claimed

    def announce(self, source: str, chunk: KVChunk) -> None:
        chunks = self.chunks.setdefault(source, [])
        whole = 0 <= chunk.first < chunk.first + chunk.count <= len(self.blocks)
        if chunk.request == self.claimed.number and chunk.number == len(chunks) and whole:
            chunks.append(chunk)

    def come(self, source: str, notice: KVNotice) -> KVChunk | None:
        """The chunk of which a layer has come; None where that makes no sense."""
        number = self.seen.get((source, notice.layer), 0)
        chunks = self.chunks.get(source, [])
        layers = len(self.landing.grids)
        if number >= len(chunks) or number & CHUNK_MASK != notice.chunk or notice.layer >= layers:
            return None
        self.seen[source, notice.layer] = number + 1
        return chunks[number]

    def store(self, chunk: KVChunk, layer: int) -> Moment:
        part = slice(chunk.first, chunk.first + chunk.count)
        return self.landing.store(layer, self.blocks[part], self.incoming.blocks[part])
