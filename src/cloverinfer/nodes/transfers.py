"""The receiving end of a KV transfer: the proof that all of it arrived.

It sees announcements and notices; who puts the blocks (``pushes``) and how they are converted
(``staging``) is not its business. A transfer is promised by the scheduler (``ExpectTransfer``).
Blocks that come straight into the pool are announced chunk by chunk (``KVChunk``) and proven by one
notice per layer and chunk; those that come through a ring are announced and proven piece by piece
(``KVPiece``). Only when every layer has had every promised token once, from every sender, with the
right checksum where checksums are on, is a transfer whole; anything else never makes a request
decodable.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Union

import numpy as np

from ..kvcache.checksum import BlockSums
from ..kvcache.layout import PoolLayout
from ..wire.messages import (
    CancelTransfer,
    ExpectTransfer,
    KVChunk,
    KVPiece,
    KVReset,
    KVSum,
    Message,
    TransferDone,
)
from ..wire.notices import CHUNK_MASK, KVNotice
from .staging import Staging

log = logging.getLogger(__name__)
MAX_EARLY = 4096
"""Transfers whose data may come before their promise; beyond it the oldest is forgotten."""
MAX_OVER = 4096
"""Transfers that are over and whose late data is known as such."""
Event = Union[KVChunk, KVSum, KVNotice, KVPiece]


@dataclass
class _Part:
    """What one sender has brought of a transfer, per layer."""

    tokens: list[int]
    """Tokens that have arrived."""
    pieces: list[int]
    """Pieces, or chunks, that have arrived."""
    chunks: list[KVChunk] = field(default_factory=list)
    sums: dict[tuple[int, int], int] = field(default_factory=dict)
    """Checksums of layers of chunks that are to come, by (number, layer)."""

    @property
    def announced(self) -> int:
        return sum(chunk.count for chunk in self.chunks)

    def chunk_of(self, notice: KVNotice) -> KVChunk | None:
        """The chunk that the notice proves; None where it is not the next one of its layer."""
        if notice.layer >= len(self.pieces):
            return None
        number = self.pieces[notice.layer]
        if number >= len(self.chunks) or number & CHUNK_MASK != notice.chunk:
            return None
        return self.chunks[number]

    def arrive(self, layer: int, tokens: int) -> None:
        self.pieces[layer] += 1
        self.tokens[layer] += tokens


@dataclass
class _Transfer:
    expect: ExpectTransfer
    parts: dict[str, _Part]
    """By sender."""

    def whole(self) -> bool:
        count = self.expect.count
        return all(tokens == count for part in self.parts.values() for tokens in part.tokens)


class TransferReceiver:
    """Counts what arrives in this node's pool against what was promised."""

    def __init__(
        self,
        name: str,
        layout: PoolLayout,
        report: Callable[[TransferDone], None],
        staging: Staging | None = None,
        sums: BlockSums | None = None,
    ) -> None:
        """``staging``: takes pieces from rings; ``sums``: every block must come with its
        checksum, and have it."""
        self._name = name
        self._layout = layout
        self._report = report
        self._staging = staging
        self._sums = sums
        self._live: dict[int, _Transfer] = {}
        self._early: OrderedDict[int, list[tuple[str, Event]]] = OrderedDict()
        self._over: OrderedDict[tuple[int, int, int], None] = OrderedDict()
        self.dropped = 0
        """Events that belonged to no promise."""
        self.corrupt = 0
        """Transfers whose checksum was wrong."""

    def __len__(self) -> int:
        return len(self._live)

    def handle(self, source: str, message: Message) -> bool:
        """Takes what is about transfers, from the node called ``source``; False for the rest."""
        if isinstance(message, ExpectTransfer):
            self.expect(message)
        elif isinstance(message, CancelTransfer):
            self.cancel(message)
        elif isinstance(message, (KVChunk, KVSum)):
            self.take(source, message)
        elif isinstance(message, KVPiece) and self._staging is not None:
            self._staging.announce(source, message)
        elif isinstance(message, KVReset) and self._staging is not None:
            self._staging.reset(source)
        else:
            return False
        return True

    def notice(self, source: str, notice: KVNotice) -> None:
        """From the node called ``source``: something that it announced is in place."""
        if self._staging is None or not self._staging.serves(source):
            self.take(source, notice)
            return
        piece = self._staging.proven(source, notice)
        if piece is None:
            self.dropped += 1
        else:
            self.take(source, piece)

    def expect(self, expect: ExpectTransfer) -> None:
        layers = self._layout.num_layers
        parts = {
            source: _Part([0] * layers, [0] * layers) for source in (expect.source, *expect.others)
        }
        self._live[expect.transfer] = _Transfer(expect, parts)
        missing = self._staging.missing_heads(list(parts)) if self._staging is not None else ""
        if missing:
            self._done(self._live[expect.transfer], missing)
        for source, event in self._early.pop(expect.transfer, []):
            self._take(source, event)
        self._finish_if_whole(expect.transfer)

    def cancel(self, cancel: CancelTransfer) -> None:
        transfer = self._live.pop(cancel.transfer, None)
        if transfer is not None:
            self._remember(transfer.expect)
        self._forget_early(self._early.pop(cancel.transfer, []))

    def take(self, source: str, event: Event) -> None:
        """A chunk's announcement, a layer's notice or a piece, from the node ``source``."""
        if event.transfer not in self._live and not self._is_over(event):
            self._early.setdefault(event.transfer, []).append((source, event))
            if len(self._early) > MAX_EARLY:
                self._forget_early(self._early.popitem(last=False)[1])
            return
        self._take(source, event)
        self._finish_if_whole(event.transfer)

    def _is_over(self, event: Event) -> bool:
        if isinstance(event, KVNotice):
            return False  # it does not say of which request; forgotten in time
        return (event.transfer, event.request, event.incarnation) in self._over

    def _remember(self, expect: ExpectTransfer) -> None:
        self._over[expect.transfer, expect.request, expect.incarnation] = None
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def _forget_early(self, events: list[tuple[str, Event]]) -> None:
        self.dropped += len(events)
        for source, event in events:
            self._give_back(source, event)

    def _take(self, source: str, event: Event) -> None:
        transfer = self._live.get(event.transfer)
        part = transfer.parts.get(source) if transfer is not None else None
        if transfer is None or part is None or not _belongs(event, transfer.expect):
            self.dropped += 1
        elif isinstance(event, KVChunk):
            self._take_chunk(transfer, part, event)
        elif isinstance(event, KVSum):
            part.sums[event.number, event.layer] = event.crc
        elif isinstance(event, KVPiece):
            self._take_piece(transfer, source, event)
        else:
            self._take_notice(transfer, part, event)
        self._give_back(source, event)

    def _give_back(self, source: str, event: Event) -> None:
        """A piece's slots may be used again, whatever became of it."""
        if isinstance(event, KVPiece) and self._staging is not None:
            self._staging.give_back(source, event)

    def _take_chunk(self, transfer: _Transfer, part: _Part, chunk: KVChunk) -> None:
        promised = len(transfer.expect.blocks)
        if chunk.number < len(part.chunks):
            self.dropped += 1  # doubled
            return
        in_order = chunk.number == len(part.chunks) and chunk.first == part.announced
        if not in_order or chunk.count < 1 or chunk.first + chunk.count > promised:
            error = (
                f"chunk of blocks {chunk.first}..{chunk.first + chunk.count} does not follow "
                f"{part.announced} of {promised} promised blocks"
            )
            self._done(transfer, error)
            return
        part.chunks.append(chunk)

    def _take_notice(self, transfer: _Transfer, part: _Part, notice: KVNotice) -> None:
        chunk = part.chunk_of(notice)
        if chunk is None:
            self.dropped += 1  # a layer of no announced chunk: foreign or doubled
            return
        expect, size = transfer.expect, self._layout.block_size
        if self._sums is not None:
            blocks = np.array(expect.blocks[chunk.first : chunk.first + chunk.count], np.int32)
            sent = part.sums.pop((chunk.number, notice.layer), None)
            if sent is None:
                self.dropped += 1  # unproven: its checksum did not come before it
                return
            if not self._matches(transfer, notice.layer, sent, self._sums.of(notice.layer, blocks)):
                return
        end = min((chunk.first + chunk.count) * size, expect.count)
        part.arrive(notice.layer, end - chunk.first * size)

    def _take_piece(self, transfer: _Transfer, source: str, piece: KVPiece) -> None:
        part, expect, staging = transfer.parts[source], transfer.expect, self._staging
        assert staging is not None
        if piece.number < part.pieces[piece.layer]:
            self.dropped += 1  # doubled
            return
        at = expect.start + part.tokens[piece.layer]
        in_order = piece.number == part.pieces[piece.layer] and piece.first == at
        if not in_order or piece.first + piece.count > expect.start + expect.count:
            error = (
                f"tokens {piece.first}..{piece.first + piece.count} of layer {piece.layer} do not "
                f"follow {at} of {expect.start + expect.count} promised tokens"
            )
            self._done(transfer, error)
            return
        if self._sums is not None:
            if piece.crc is None:
                self.dropped += 1
                return
            if not self._matches(transfer, piece.layer, piece.crc, staging.sum_of(source, piece)):
                return
        staging.import_piece(source, piece, expect)
        part.arrive(piece.layer, piece.count)

    def _matches(self, transfer: _Transfer, layer: int, sent: int, found: int) -> bool:
        if sent == found:
            return True
        self.corrupt += 1
        error = f"layer {layer} has the checksum {found:08x} and was sent with {sent:08x}"
        self._done(transfer, error)
        return False

    def _finish_if_whole(self, slot: int) -> None:
        transfer = self._live.get(slot)
        if transfer is not None and transfer.whole():
            self._done(transfer)

    def _done(self, transfer: _Transfer, error: str = "") -> None:
        expect = transfer.expect
        del self._live[expect.transfer]
        self._remember(expect)
        sizes = {
            source: sum(
                tokens * self._layout.specs[layer].token_bytes
                for layer, tokens in enumerate(part.tokens)
            )
            for source, part in transfer.parts.items()
        }
        self._report(
            TransferDone(
                self._name,
                expect.transfer,
                expect.request,
                expect.incarnation,
                sum(sizes.values()),
                error,
                {source: size // len(sizes) for source, size in sizes.items()},
            )
        )


def _belongs(event: Event, expect: ExpectTransfer) -> bool:
    if isinstance(event, KVNotice):
        return True  # that it fits a chunk of this incarnation is checked by its number
    return (event.request, event.incarnation) == (expect.request, expect.incarnation)
