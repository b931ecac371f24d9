"""A receiver's rings: where blocks land that are not as its pool has them, and their conversion.

Each sender has a ring of its own, made of slots that take one block of one layer as the sender has
it. The sender fills slots that it was granted or got back; it announces what it puts as pieces, and
a piece's notice proves that its bytes are there. What a piece is worth to a request is for
``transfers`` to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from .. import _native
from ..core.errors import ConfigError
from ..kvcache.convert import (
    Array,
    block_parts,
    convert,
    covers_heads,
    gather_tokens,
    needs_conversion,
)
from ..kvcache.layout import CANONICAL_LAYOUT, PoolLayout, blocks_for
from ..transport.base import Region
from ..wire.messages import (
    ExpectTransfer,
    KVCredit,
    KVPiece,
    Message,
    PeerInfo,
    StagingGrant,
)
from ..wire.notices import CHUNK_MASK, KVNotice
from .copies import NOW, Moment
from .later import Later

SLOT_ALIGNMENT = 64


class Store(ABC):
    """How a pool takes what is in slots. A moment is when it has: what is computed later sees it,
    and until then slots and arrays stay as they are."""

    @abstractmethod
    def tokens(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> Moment:
        """See ``PoolWriter.store``."""

    def blocks(
        self, layer: int, slots_bs: npt.NDArray[np.uint8], slots: list[int], blocks: list[int]
    ) -> Moment | None:
        """Whole blocks as the pool has them, one in each of ``slots`` of the ring's memory; None
        where they are better taken as tokens."""
        return None


def is_staged(sender: PeerInfo, receiver: PeerInfo) -> bool:
    """Whether the sender's blocks go through a ring. ``ConfigError`` naming field and values where
    they cannot become the receiver's at all."""
    assert sender.layout is not None
    assert receiver.layout is not None
    if sender.layout_name != CANONICAL_LAYOUT:
        raise ConfigError(
            f"KV layout is {sender.layout_name} on {sender.name}, which cannot put blocks of it; "
            f"it must be {CANONICAL_LAYOUT}"
        )
    differ = needs_conversion(sender.layout, receiver.layout, sender.first_head)
    return differ or receiver.layout_name != CANONICAL_LAYOUT


@dataclass
class _Ring:
    layout: PoolLayout
    """Of the sender."""
    first_head: int
    region: Region
    slots_sb: npt.NDArray[np.uint8]
    """``[slots, slot bytes]``."""
    announced: deque[KVPiece] = field(default_factory=deque)
    held: set[int] = field(default_factory=set)
    """Slots of pieces that are proven and have not been given back."""


class Staging:
    """All rings of one receiver."""

    def __init__(
        self,
        layout: PoolLayout,
        register: Callable[[int], Region],
        send: Callable[[str, Message], None],
        store: Store,
        later: Later | None = None,
    ) -> None:
        """``send`` takes a node's name; ``later``: of the node, whose loop gives slots back that
        are still being read."""
        self._layout = layout
        self._register = register
        self._send = send
        self._store = store
        self._later = Later() if later is None else later
        self._stored: Moment = NOW
        """When all that was imported is in the pool: that happens in order."""
        self._rings: dict[str, _Ring] = {}
        self._heads: dict[str, tuple[int, int]] = {}

    def meet(self, senders: Sequence[PeerInfo], staged: Sequence[PeerInfo], nbytes: int) -> None:
        """Grants the ``staged`` ones among the senders their shares of ``nbytes`` bytes.

        ``ConfigError`` with both numbers where a share does not hold one block of a layer.
        """
        for info in senders:
            assert info.layout is not None
            heads = info.layout.specs[0].kv_heads
            self._heads[info.name] = info.first_head, info.first_head + heads
        for info in staged:
            self._grant(info, nbytes // len(staged))

    def _grant(self, info: PeerInfo, share: int) -> None:
        layout = info.layout
        assert layout is not None
        largest = max(layout.layer_block_bytes(i) for i in range(layout.num_layers))
        slot_bytes = -(-largest // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        slots = min(share // slot_bytes, layout.num_blocks * layout.num_layers)
        if slots < 1:
            raise ConfigError(
                f"a block of {info.name} has {slot_bytes} bytes in a layer, and its share of the "
                f"staging ring {share} bytes: raise network.staging_mib"
            )
        region = self._register(slots * slot_bytes)
        memory = np.frombuffer(region.buffer, np.uint8).reshape(slots, slot_bytes)
        self._rings[info.name] = _Ring(layout, info.first_head, region, memory)
        self._send(info.name, StagingGrant(region.ref, slots, slot_bytes))

    def serves(self, source: str) -> bool:
        return source in self._rings

    def missing_heads(self, sources: Sequence[str]) -> str:
        """Why these senders together do not have every KV head once; empty where they do."""
        ranges = [self._heads[source] for source in sources if source in self._heads]
        heads = self._layout.specs[0].kv_heads
        if len(ranges) < len(sources) or covers_heads(ranges, heads):
            return ""
        given = ", ".join(f"{first}..{end - 1}" for first, end in sorted(ranges))
        return f"the senders have KV heads {given} and not each of {heads} once"

    def announce(self, source: str, piece: KVPiece) -> None:
        """What makes no sense is dropped."""
        ring = self._rings.get(source)
        if ring is not None and _sensible(ring, piece):
            ring.announced.append(piece)

    def proven(self, source: str, notice: KVNotice) -> KVPiece | None:
        """The piece that a notice proves. Those announced before it never arrived, since a sender's
        puts come in order: their slots are given back. None for a notice of no piece."""
        ring = self._rings[source]
        if not any(_proves(notice, piece) for piece in ring.announced):
            return None
        while not _proves(notice, piece := ring.announced.popleft()):
            self.give_back(source, piece)
        ring.held.update(piece.slots)
        return piece

    def give_back(self, source: str, piece: KVPiece) -> None:
        """The piece's slots may be used again, once what was imported has been read."""
        self._later.after(self._stored, lambda: self._credit(source, piece))

    def _credit(self, source: str, piece: KVPiece) -> None:
        self._rings[source].held.difference_update(piece.slots)
        self._send(source, KVCredit(piece.slots))

    def reset(self, source: str) -> None:
        """The sender's puts have failed and ended: only what is proven is still of use."""
        ring = self._rings.get(source)
        if ring is not None:
            ring.announced.clear()
            free = set(range(len(ring.slots_sb))) - ring.held
            self._send(source, KVCredit(sorted(free)))

    def sum_of(self, source: str, piece: KVPiece) -> int:
        """The checksum of what lies in the piece's slots."""
        ring = self._rings[source]
        offsets = np.array(piece.slots, np.int64) * ring.slots_sb.shape[1]
        length = ring.layout.layer_block_bytes(piece.layer)
        return _native.crc32c_slices(ring.region.buffer, offsets, length)

    def import_piece(self, source: str, piece: KVPiece, expect: ExpectTransfer) -> None:
        """Stores a piece's tokens, converted, in the blocks that were promised."""
        self._stored = self._import_whole(source, piece, expect) or self._import_tokens(
            source, piece, expect
        )

    def _import_whole(self, source: str, piece: KVPiece, expect: ExpectTransfer) -> Moment | None:
        """Where its blocks are as ours, and begin where ours do."""
        ring, size, layer = self._rings[source], self._layout.block_size, piece.layer
        at = piece.first - expect.start
        same = ring.layout.specs[layer] == self._layout.specs[layer]
        if not same or ring.layout.block_size != size or piece.skip or at % size:
            return None
        first, count = at // size, blocks_for(piece.count, size)
        return self._store.blocks(
            layer, ring.slots_sb, piece.slots[:count], expect.blocks[first : first + count]
        )

    def _import_tokens(self, source: str, piece: KVPiece, expect: ExpectTransfer) -> Moment:
        ring, size = self._rings[source], self._layout.block_size
        spec = ring.layout.specs[piece.layer]
        blocks = block_parts(ring.slots_sb[piece.slots], spec, ring.layout.block_size)
        wanted = self._layout.specs[piece.layer].dtype
        k, v = (
            convert(gather_tokens(part, piece.skip, piece.count), spec.dtype, wanted)
            for part in blocks
        )
        at = piece.first - expect.start + np.arange(piece.count)
        table = np.array(expect.blocks, np.int64)
        slots = table[at // size] * size + at % size
        return self._store.tokens(piece.layer, k, v, slots, ring.first_head)


def _sensible(ring: _Ring, piece: KVPiece) -> bool:
    size, slots = ring.layout.block_size, len(ring.slots_sb)
    return (
        0 <= piece.layer < ring.layout.num_layers
        and bool(piece.slots)
        and all(0 <= slot < slots for slot in piece.slots)
        and piece.count >= 1
        and piece.skip >= 0
        and piece.skip + piece.count <= len(piece.slots) * size
    )


def _proves(notice: KVNotice, piece: KVPiece) -> bool:
    return (notice.transfer, notice.layer, notice.chunk) == (
        piece.transfer,
        piece.layer,
        piece.number & CHUNK_MASK,
    )
