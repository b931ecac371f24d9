"""The dense node's steps without Python between layers: over which wire, and for how long.

It prepares loops and reads off how far they are. What a loop cannot do it leaves, layer and carry,
to the node, which goes on layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from .. import _native
from ..models.base import Carry, DenseHalf, NativeDense, NativeStep
from ..transport import Endpoint, Peer, Ranges
from ..transport.native import MailboxWire, NearWire
from ..wire.messages import StepStats
from ..wire.notices import pack_hop
from .gate import Gate, OpenGate
from .hop import HopRows, HopShape
from .layer_loop import alike, qkv_addresses
from .rows import Batch


class Segment(Protocol):
    """Adjacent rows of a step that live on one attention node."""

    home: str
    first: int
    count: int
    back: HopRows


@dataclass(frozen=True)
class Way:
    """To one attention node."""

    peer: Peer
    ranges: Ranges
    """Of the step's lane."""


@dataclass
class StepLoop:
    """One step's layers; tensors are here so that they live as long as the loop."""

    loop: _native.LayerLoop
    hop: _native.NearHop | _native.ShmHop
    step: NativeStep
    attended_te: torch.Tensor
    homes: list[str]

    @property
    def layer(self) -> int:
        """The layer whose hop is under way, or is to be made."""
        return self.loop.layer

    def run(self, timeout: float) -> _native.LoopOutcome:
        return self.loop.run(timeout)

    def waiting(self) -> set[str]:
        """Attention nodes that have not answered for ``layer``."""
        if not isinstance(self.hop, _native.ShmHop):
            return set()
        return {self.homes[i] for i in self.hop.waiting}

    def lost(self) -> list[str]:
        """Attention nodes to which the hop of ``layer`` could not be made."""
        if not isinstance(self.hop, _native.ShmHop):
            return []
        return [self.homes[i] for i in self.hop.lost]

    def carry(self) -> Carry:
        """Of the stage of ``layer``."""
        return self.step.carry(self.layer + 1)

    def account(self, stats: StepStats, layers: int) -> None:
        """Adds the time of what the loop did; it made ``layers`` hops."""
        stats.dense += self.loop.dense_seconds
        stats.barrier += self.loop.wait_seconds
        stats.barriers += layers
        stats.attention_calls += layers * len(self.homes)
        stats.native_layers += layers


@dataclass(frozen=True)
class HopLoops:
    """Of one dense node with one lane: the loops of its steps."""

    dense: NativeDense
    shape: HopShape
    wire: NearWire | MailboxWire
    number: int
    """The dense node's own, as attention nodes count them."""
    gate: Gate | OpenGate

    @classmethod
    def of(
        cls,
        half: DenseHalf,
        shape: HopShape,
        endpoint: Endpoint,
        number: int,
        gate: Gate | OpenGate,
    ) -> HopLoops | None:
        """None where half or transport have no way, or layers are not alike."""
        dense, wire = half.native(), endpoint.native()
        uniform = alike(shape.specs, shape.num_heads, shape.dtype)
        if dense is None or wire is None or uniform is None:
            return None
        return cls(dense, shape, wire, number, gate)

    def begin(
        self,
        batch: Batch,
        there: HopRows,
        notice: tuple[int, int],
        ways: Sequence[tuple[Segment, Way]],
    ) -> StepLoop | None:
        """A step of ``notice`` (lane, step); None where it cannot run so."""
        tokens = batch.token_ids_t.shape[0]
        if tokens != len(batch.rows):
            return None
        attended_te = torch.empty((tokens, self.shape.back), dtype=self.shape.dtype)
        first = pack_hop(*notice, 0)
        if isinstance(self.wire, NearWire):
            hop = self._near(self.wire, ways, there, attended_te, first)
        else:
            hop = self._mailbox(self.wire, ways, there, attended_te, first)
        if hop is None:
            return None
        step = self.dense.begin(batch.token_ids_t, batch.positions_t)
        loop = _native.LayerLoop(
            dense=self.dense.table,
            step=step.address,
            qkv=qkv_addresses(there.qkv(0)),
            hop=hop,
            gate=self.gate.native,
        )
        return StepLoop(loop, hop, step, attended_te, [segment.home for segment, _ in ways])

    def _near(
        self,
        wire: NearWire,
        ways: Sequence[tuple[Segment, Way]],
        there: HopRows,
        attended_te: torch.Tensor,
        notice: int,
    ) -> _native.NearHop | None:
        parts = []
        for segment, way in ways:
            answerer = wire.offered_by(way.peer)
            if not isinstance(answerer, _native.Answerer):
                return None
            parts.append((answerer, self.number, notice, segment.first, segment.count))
        return _native.NearHop(
            parts=parts,
            qkv=qkv_addresses(there.qkv(0)),
            element_bytes=self.shape.dtype.itemsize,
            o=attended_te.data_ptr(),
            row_bytes=self.shape.row_bytes(back=True),
        )

    def _mailbox(
        self,
        wire: MailboxWire,
        ways: Sequence[tuple[Segment, Way]],
        there: HopRows,
        attended_te: torch.Tensor,
        notice: int,
    ) -> _native.ShmHop | None:
        parts = []
        for segment, way in ways:
            writer, rings = wire.writer_to(way.peer), wire.rings_of(way.peer)
            if writer is None or not rings:
                return None
            back = segment.back.output(0).data_ptr()
            target = wire.first_target(way.ranges)
            parts.append((writer, rings, segment.first, segment.count, target, back))
        return _native.ShmHop(
            reader=wire.reader,
            parts=parts,
            row_bytes=(self.shape.row_bytes(back=False), self.shape.row_bytes(back=True)),
            rows=there.qkv(0)[0].data_ptr(),
            o=attended_te.data_ptr(),
            notice=notice,
        )
