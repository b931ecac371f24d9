"""Layers without Python: whether a node's steps can run so, and what a step hands to the loop.

It owns the tensors that a loop works on for as long as the loop lives. It does not choose: whoever
runs steps asks, and has the layers in Python for what is not served here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch

from .. import _native
from ..attention.base import AttentionBackend, NativeAttention
from ..kvcache.layout import KVSpec
from ..models.base import QKV, DenseHalf, NativeDense, NativeStep
from ..wire.messages import StepStats
from .gate import Gate, OpenGate
from .hop import HopRows, HopShape
from .rows import Batch

NO_WAIT = 0.0
Rows = tuple[int, int, int, int, int, int, int]
"""Starts, tables, blocks of a table, lengths, slots; rows, tokens."""


def qkv_addresses(qkv: QKV) -> tuple[int, int, int, int, int, int]:
    """Address and token stride of each."""
    q, k, v = qkv
    return q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0)


def attention_rows(
    starts: torch.Tensor, tables_rb: torch.Tensor, lengths_r: torch.Tensor, slots_t: torch.Tensor
) -> Rows:
    """Of tensors that outlive the loop, of the types that ``AttentionBackend`` names."""
    assert all(x.is_contiguous() for x in (starts, tables_rb, lengths_r, slots_t))
    assert starts.dtype == tables_rb.dtype == lengths_r.dtype == torch.int32
    assert slots_t.dtype == torch.int64
    return (
        starts.data_ptr(),
        tables_rb.data_ptr(),
        tables_rb.shape[1],
        lengths_r.data_ptr(),
        slots_t.data_ptr(),
        lengths_r.shape[0],
        slots_t.shape[0],
    )


def alike(specs: tuple[KVSpec, ...], num_heads: int, dtype: torch.dtype) -> HopShape | None:
    """The shape of a row, where it is that of every layer and stored in its own type; bfloat16 is
    all that loops take, as native stages give nothing else."""
    shape = HopShape(specs, num_heads, dtype)
    stored = {getattr(torch, spec.dtype, None) for spec in specs}
    return shape if {dtype, *stored} == {torch.bfloat16} and set(shape.kinds) == {0} else None


class OwnRows:
    """Rows of a step of ``tokens`` tokens on their way through a layer, and views of them."""

    def __init__(self, shape: HopShape, tokens: int) -> None:
        self._there_tx = torch.empty((tokens, shape.there), dtype=shape.dtype)
        self._back_te = torch.empty((tokens, shape.back), dtype=shape.dtype)
        self._lse_th = torch.empty((tokens, shape.num_heads))
        self.qkv = qkv_addresses(HopRows(shape, self._there_tx).qkv(0))
        self.attended = HopRows(shape, self._back_te).output(0)
        """``[t, h, e]``"""
        self.lse = self._lse_th.data_ptr()


Inputs = tuple[torch.Tensor, ...]
"""Token ids, positions, query starts, block tables, lengths and slots of a step."""


def inputs_of(batch: Batch) -> Inputs:
    assert batch.block_tables_rb is not None
    assert batch.slots_t is not None
    return (
        batch.token_ids_t,
        batch.positions_t,
        batch.query_starts,
        batch.block_tables_rb,
        batch.lengths_r,
        batch.slots_t,
    )


@dataclass(frozen=True)
class OwnStep:
    """A step's layers, and those of the steps after it whose inputs are in the same memory."""

    loop: _native.LayerLoop
    hop: _native.OwnHop
    dense: NativeStep
    rows: OwnRows
    inputs: Inputs


@dataclass(frozen=True)
class OwnLoop:
    """Layers of a node that attends over a pool of its own."""

    dense: NativeDense
    attention: NativeAttention
    shape: HopShape
    gate: Gate | OpenGate
    kept: list[OwnStep] = field(default_factory=list)
    """The last one: decode's steps are alike for long."""

    @classmethod
    def of(
        cls, half: DenseHalf, backend: AttentionBackend, gate: Gate | OpenGate
    ) -> OwnLoop | None:
        """None where either side has no table, or their layers are not alike."""
        dense, attention = half.native(), backend.native()
        shape = alike(half.specs, half.arch.num_heads, half.dtype)
        if dense is None or attention is None or shape is None:
            return None
        return cls(dense, attention, shape, gate)

    def serves(self, batch: Batch) -> bool:
        """Decode rows, and chunks of few tokens."""
        return batch.most <= self.attention.max_queries

    def run(self, batch: Batch, stats: StepStats) -> tuple[torch.Tensor, NativeStep]:
        """Attention's output of the last layer ``[t, h, e]``, which the next step overwrites, and
        the step, whose carry goes with it."""
        step = self._step(batch)
        outcome = step.loop.run(NO_WAIT)
        assert outcome == _native.LoopOutcome.DONE, outcome
        layers = self.dense.table.layers
        stats.dense += step.loop.dense_seconds
        stats.attention += step.hop.seconds
        stats.attention_calls += layers
        stats.native_layers += layers
        return step.rows.attended, step.dense

    def _step(self, batch: Batch) -> OwnStep:
        inputs = inputs_of(batch)
        if self.kept and all(map(operator.is_, inputs, self.kept[0].inputs)):
            self.kept[0].loop.restart(0)
            return self.kept[0]
        rows = OwnRows(self.shape, len(inputs[0]))
        token_ids_t, positions_t, *attended = inputs
        hop = _native.OwnHop(
            table=self.attention.table,
            rows=attention_rows(*attended),
            qkv=rows.qkv,
            o=rows.attended.data_ptr(),
            lse=rows.lse,
        )
        step = self.dense.begin(token_ids_t, positions_t)
        loop = _native.LayerLoop(
            dense=self.dense.table,
            step=step.address,
            qkv=rows.qkv,
            hop=hop,
            gate=self.gate.native,
        )
        self.kept[:] = [OwnStep(loop, hop, step, rows, inputs)]
        return self.kept[0]
