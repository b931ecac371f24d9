"""The receiving end of a KV transfer: the proof that all of it arrived.

It sees announcements and notices; who puts the blocks (``pushes``) and where they go is not its
business. A transfer is promised by the scheduler (``ExpectTransfer``), announced chunk by chunk by
the prefill node (``KVChunk``) and proven by notices: one per layer and chunk. Only when every layer
has had every promised block once is it whole; anything else never makes a request decodable.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from ..kvcache.layout import PoolLayout
from ..wire.messages import (
    CancelTransfer,
    ExpectTransfer,
    KVChunk,
    Message,
    TransferDone,
)
from ..wire.notices import CHUNK_MASK, KVNotice

log = logging.getLogger(__name__)
MAX_EARLY = 4096
"""Transfers whose data may come before their promise; beyond it the oldest is forgotten."""


@dataclass
class _Transfer:
    expect: ExpectTransfer
    chunks: list[int] = field(default_factory=list)
    """Blocks of each announced chunk."""
    arrived: list[int] = field(default_factory=list)
    """Per layer: chunks that arrived."""

    @property
    def announced(self) -> int:
        return sum(self.chunks)

    def expects(self, notice: KVNotice) -> bool:
        """It is the next of its layer's notices, and its chunk has been announced."""
        if notice.layer >= len(self.arrived):
            return False
        chunk = self.arrived[notice.layer]
        return chunk < len(self.chunks) and chunk & CHUNK_MASK == notice.chunk

    def whole(self) -> bool:
        done = len(self.chunks)
        return self.announced == len(self.expect.blocks) and all(n == done for n in self.arrived)


class TransferReceiver:
    """Counts what arrives in this node's pool against what was promised."""

    def __init__(
        self, name: str, layout: PoolLayout, report: Callable[[TransferDone], None]
    ) -> None:
        self._name = name
        self._layout = layout
        self._report = report
        self._live: dict[int, _Transfer] = {}
        self._early: OrderedDict[int, list[tuple[str, KVChunk | KVNotice]]] = OrderedDict()
        self.dropped = 0
        """Chunks and notices that belonged to no promise."""

    def __len__(self) -> int:
        return len(self._live)

    def handle(self, source: str, message: Message) -> bool:
        """Takes what is about transfers, from the node called ``source``; False for the rest."""
        if isinstance(message, ExpectTransfer):
            self.expect(message)
        elif isinstance(message, CancelTransfer):
            self.cancel(message)
        elif isinstance(message, KVChunk):
            self.take(source, message)
        else:
            return False
        return True

    def expect(self, expect: ExpectTransfer) -> None:
        transfer = _Transfer(expect, arrived=[0] * self._layout.num_layers)
        self._live[expect.transfer] = transfer
        for source, event in self._early.pop(expect.transfer, []):
            self._take(source, event)
        self._finish_if_whole(expect.transfer)

    def cancel(self, cancel: CancelTransfer) -> None:
        self._live.pop(cancel.transfer, None)
        self._early.pop(cancel.transfer, None)

    def take(self, source: str, event: KVChunk | KVNotice) -> None:
        """A chunk's announcement or a layer's notice, from the node called ``source``."""
        if event.transfer not in self._live:
            self._early.setdefault(event.transfer, []).append((source, event))
            if len(self._early) > MAX_EARLY:
                _, forgotten = self._early.popitem(last=False)
                self.dropped += len(forgotten)
            return
        self._take(source, event)
        self._finish_if_whole(event.transfer)

    def _take(self, source: str, event: KVChunk | KVNotice) -> None:
        transfer = self._live.get(event.transfer)
        if transfer is None or source != transfer.expect.source:
            self.dropped += 1
        elif isinstance(event, KVChunk):
            self._take_chunk(transfer, event)
        elif transfer.expects(event):
            transfer.arrived[event.layer] += 1
        else:
            self.dropped += 1  # a layer of no announced chunk: foreign or doubled

    def _take_chunk(self, transfer: _Transfer, chunk: KVChunk) -> None:
        expect = transfer.expect
        if (chunk.request, chunk.incarnation) != (expect.request, expect.incarnation):
            self.dropped += 1
            return
        if chunk.number < len(transfer.chunks):
            self.dropped += 1  # doubled
            return
        in_order = chunk.number == len(transfer.chunks) and chunk.first == transfer.announced
        if not in_order or chunk.count < 1 or chunk.first + chunk.count > len(expect.blocks):
            error = (
                f"chunk of blocks {chunk.first}..{chunk.first + chunk.count} does not follow "
                f"{transfer.announced} of {len(expect.blocks)} promised blocks"
            )
            self._done(transfer, error)
            return
        transfer.chunks.append(chunk.count)

    def _finish_if_whole(self, slot: int) -> None:
        transfer = self._live.get(slot)
        if transfer is not None and transfer.whole():
            self._done(transfer)

    def _done(self, transfer: _Transfer, error: str = "") -> None:
        expect = transfer.expect
        del self._live[expect.transfer]
        nbytes = sum(
            sum(transfer.chunks[:arrived]) * self._layout.layer_block_bytes(layer)
            for layer, arrived in enumerate(transfer.arrived)
        )
        self._report(
            TransferDone(
                self._name,
                expect.transfer,
                expect.request,
                expect.incarnation,
                nbytes,
                error,
                expect.source,
            )
        )
