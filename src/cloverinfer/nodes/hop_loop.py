"""The dense node's steps without Python between layers: over which wire, and for how long.

It prepares loops and reads off how far they are. What a loop cannot do it leaves, layer and carry,
to the node, which goes on layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

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


Inputs = tuple[torch.Tensor, torch.Tensor]
"""Token ids and positions of a step."""
Ways = Sequence[tuple[Segment, Way]]
Ends = list[tuple[Any, ...]]
"""What ways lead to: each node's answerer, or the writer to it, the rings from it, and where rows
go."""


@dataclass
class StepLoop:
    """One step's layers, and those of the steps after it that have the same rows in the same
    memory; tensors are here so that they live as long as the loop."""

    loop: _native.LayerLoop
    hop: _native.NearHop | _native.ShmHop
    step: NativeStep
    inputs: Inputs
    ways: Ways
    ends: Ends
    attended_the: torch.Tensor
    """Attention's output, where it does not come over a wire."""
    homes: list[str]

    def serves(self, batch: Batch, ways: Ways, ends: Ends) -> bool:
        """Whether the step is one like the last."""
        token_ids_t, positions_t = self.inputs
        same = token_ids_t is batch.token_ids_t and positions_t is batch.positions_t
        return same and ways is self.ways and ends == self.ends

    @property
    def layer(self) -> int:
        """The layer whose hop is under way, or is to be made."""
        return self.loop.layer

    def run(self, timeout: float) -> _native.LoopOutcome:
        return self.loop.run(timeout)

    def near_seconds(self) -> list[float] | None:
        """In which each home's layers were answered on this thread; None over a wire."""
        return self.hop.seconds if isinstance(self.hop, _native.NearHop) else None

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
        stats.barrier += self.loop.hop_seconds
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
    kept: list[StepLoop] = field(default_factory=list)
    """That of the last step: decode's are alike for long."""

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
        self, batch: Batch, there: HopRows, notice: tuple[int, int], ways: Ways
    ) -> StepLoop | None:
        """A step of ``notice`` (lane, step); None where it cannot run so. ``ways``, the same object
        for as long as they lead to the same memory, from ``there``."""
        if batch.token_ids_t.shape[0] != len(batch.rows):
            return None
        ends = self._ends(ways)
        if ends is None:
            return None
        first = pack_hop(*notice, 0)
        if self.kept and self.kept[0].serves(batch, ways, ends):
            self.kept[0].loop.restart(first)
            return self.kept[0]
        self.kept[:] = [self._make(batch, there, first, ways, ends)]
        return self.kept[0]

    def _ends(self, ways: Ways) -> Ends | None:
        """None where one has none."""
        ends: Ends = []
        for _, way in ways:
            if isinstance(self.wire, NearWire):
                answerer = self.wire.offered_by(way.peer)
                if not isinstance(answerer, _native.Answerer):
                    return None
                ends.append((answerer,))
                continue
            writer, rings = self.wire.writer_to(way.peer), self.wire.rings_of(way.peer)
            if writer is None or not rings:
                return None
            ends.append((writer, rings, self.wire.first_target(way.ranges)))
        return ends

    def _make(
        self,
        batch: Batch,
        there: HopRows,
        notice: int,
        ways: Ways,
        ends: Ends,
    ) -> StepLoop:
        attended_te = torch.empty((len(batch.rows), self.shape.back), dtype=self.shape.dtype)
        made = self._near if isinstance(self.wire, NearWire) else self._mailbox
        hop = made(ways, ends, there, attended_te, notice)
        step = self.dense.begin(batch.token_ids_t, batch.positions_t)
        loop = _native.LayerLoop(
            dense=self.dense.table,
            step=step.address,
            qkv=qkv_addresses(there.qkv(0)),
            hop=hop,
            gate=self.gate.native,
        )
        return StepLoop(
            loop,
            hop,
            step,
            (batch.token_ids_t, batch.positions_t),
            ways,
            ends,
            HopRows(self.shape, attended_te).output(0),
            [segment.home for segment, _ in ways],
        )

    def _near(
        self,
        ways: Ways,
        ends: Ends,
        there: HopRows,
        attended_te: torch.Tensor,
        notice: int,
    ) -> _native.NearHop:
        parts = [
            (answerer, self.number, notice, segment.first, segment.count)
            for (segment, _), (answerer,) in zip(ways, ends, strict=True)
        ]
        return _native.NearHop(
            parts=parts,
            qkv=qkv_addresses(there.qkv(0)),
            element_bytes=self.shape.dtype.itemsize,
            o=attended_te.data_ptr(),
            row_bytes=self.shape.row_bytes(back=True),
        )

    def _mailbox(
        self,
        ways: Ways,
        ends: Ends,
        there: HopRows,
        attended_te: torch.Tensor,
        notice: int,
    ) -> _native.ShmHop:
        assert isinstance(self.wire, MailboxWire)
        parts = []
        for (segment, _), (writer, rings, target) in zip(ways, ends, strict=True):
            back = segment.back.output(0).data_ptr()
            parts.append((writer, rings, segment.first, segment.count, target, back))
        return _native.ShmHop(
            reader=self.wire.reader,
            parts=parts,
            row_bytes=(self.shape.row_bytes(back=False), self.shape.row_bytes(back=True)),
            rows=there.qkv(0)[0].data_ptr(),
            o=attended_te.data_ptr(),
            notice=notice,
        )
