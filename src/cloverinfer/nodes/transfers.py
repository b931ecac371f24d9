"""Both ends of a KV transfer: the prefill node's puts, and the receiver's proof that all arrived.

A transfer is promised by the scheduler (``ExpectTransfer``), announced chunk by chunk by the
prefill node (``KVChunk``) and proven by notices: one per layer and chunk. Only when every layer
has had every promised block once is it whole; anything else never makes a request decodable.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from ..core.errors import PeerGoneError, TransportError
from ..kvcache.layout import PoolLayout
from ..transport.base import Endpoint, Peer, Ranges, Region, RegionRef, Slices
from ..wire.messages import (
    CancelTransfer,
    ExpectTransfer,
    KVChunk,
    Message,
    PeerInfo,
    TransferDone,
    encode,
)
from ..wire.notices import KVNotice, pack_kv
from .rows import Row

log = logging.getLogger(__name__)
MAX_EARLY = 4096
"""Transfers whose data may come before their promise; beyond it the oldest is forgotten."""


def layer_slices(region: Region | RegionRef, layout: PoolLayout, layer: int) -> Slices:
    """Every block of one layer as a slice."""
    length = layout.layer_block_bytes(layer)
    offsets = layout.layer_offsets[layer] + np.arange(layout.num_blocks, dtype=np.int64) * length
    return Slices(region, offsets, length)


class KVPusher:
    """Puts blocks of the local pool into one receiver's pool."""

    def __init__(
        self, endpoint: Endpoint, link: Peer, info: PeerInfo, pool: Region, layout: PoolLayout
    ) -> None:
        assert info.layout is not None, f"{info.name} has no pool"
        theirs = info.layout
        self._endpoint = endpoint
        self._link = link
        self._name = info.name
        self._layout = layout
        self._ranges: list[Ranges] = [
            endpoint.prepare(
                link, layer_slices(pool, layout, i), layer_slices(info.regions["kv"], theirs, i)
            )
            for i in range(layout.num_layers)
        ]

    def announce(self, chunk: KVChunk) -> None:
        try:
            self._endpoint.send(self._link, encode(chunk))
        except TransportError as problem:
            raise PeerGoneError(self._name, str(problem)) from problem

    def put_layer(self, transfer: int, layer: int, index: np.ndarray) -> int:
        """Puts the blocks of ``index`` (local, remote); returns the bytes sent."""
        try:
            ticket = self._endpoint.put(self._ranges[layer], index, pack_kv(transfer, layer))
        except TransportError as problem:
            raise PeerGoneError(self._name, str(problem)) from problem
        if ticket.error is not None:
            raise PeerGoneError(self._name, str(ticket.error)) from ticket.error
        # Transports whose puts finish later must not let the pool be reused before they have:
        # the prefill node waits for its tickets before it reports the step.
        assert ticket.done, "asynchronous puts need a wait before StepDone"
        return len(index) * self._layout.layer_block_bytes(layer)


@dataclass
class PushJob:
    """The blocks of one row that this step's chunk completes."""

    pusher: KVPusher
    transfer: int
    chunk: KVChunk
    index: np.ndarray


def plan_push(
    row: Row, blocks: np.ndarray, end: int, final: bool, block_size: int, pusher: KVPusher
) -> PushJob | None:
    """What to send once positions up to ``end`` are computed: whole blocks, and at the end of the
    prompt the last partial one too. Marks them as pushed."""
    push = row.push
    assert push is not None
    until = len(push.blocks) if final else end // block_size
    first = row.pushed
    if until <= first:
        return None
    row.pushed = until
    index = np.empty((until - first, 2), np.int32)
    index[:, 0] = blocks[first:until]
    index[:, 1] = push.blocks[first:until]
    chunk = KVChunk(push.transfer, row.request, row.incarnation, first - push.skip, until - first)
    return PushJob(pusher, push.transfer, chunk, index)


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
        elif event.layer >= len(transfer.arrived) or transfer.arrived[event.layer] == len(
            transfer.chunks
        ):
            self.dropped += 1  # a layer of no announced chunk: foreign or doubled
        else:
            transfer.arrived[event.layer] += 1

    def _take_chunk(self, transfer: _Transfer, chunk: KVChunk) -> None:
        expect = transfer.expect
        if (chunk.request, chunk.incarnation) != (expect.request, expect.incarnation):
            self.dropped += 1
            return
        in_order = chunk.first == transfer.announced
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
                self._name, expect.transfer, expect.request, expect.incarnation, nbytes, error
            )
        )
