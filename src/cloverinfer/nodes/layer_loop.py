"""Layers without Python: whether a node's steps can run so, and what a step hands to the loop.

It owns the tensors that a loop works on for as long as the loop lives. It does not choose: whoever
runs steps asks, and has the layers in Python for what is not served here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .. import _native
from ..attention.base import AttentionBackend, NativeAttention
from ..kvcache.layout import KVSpec
from ..models.base import QKV, Carry, DenseHalf, NativeDense
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


@dataclass(frozen=True)
class OwnLoop:
    """Layers of a node that attends over a pool of its own."""

    dense: NativeDense
    attention: NativeAttention
    shape: HopShape
    gate: Gate | OpenGate
    kept: dict[int, OwnRows] = field(default_factory=dict)
    """Those of the last step, by its tokens: decode's steps are alike for long."""

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

    def run(self, batch: Batch, stats: StepStats) -> tuple[torch.Tensor, Carry]:
        """Attention's output of the last layer ``[t, h, e]``, which the next step overwrites, and
        the carry beside it."""
        assert batch.block_tables_rb is not None
        assert batch.slots_t is not None
        tokens, layers = batch.token_ids_t.shape[0], self.dense.table.layers
        rows = self._rows(tokens)
        hop = _native.OwnHop(
            table=self.attention.table,
            rows=attention_rows(
                batch.query_starts, batch.block_tables_rb, batch.lengths_r, batch.slots_t
            ),
            qkv=rows.qkv,
            o=rows.attended.data_ptr(),
            lse=rows.lse,
        )
        step = self.dense.begin(batch.token_ids_t, batch.positions_t)
        loop = _native.LayerLoop(
            dense=self.dense.table,
            step=step.address,
            qkv=rows.qkv,
            hop=hop,
            gate=self.gate.native,
        )
        outcome = loop.run(NO_WAIT)
        assert outcome == _native.LoopOutcome.DONE, outcome
        stats.dense += loop.dense_seconds
        stats.attention += hop.seconds
        stats.attention_calls += layers
        stats.native_layers += layers
        return rows.attended, step.carry(layers)

    def _rows(self, tokens: int) -> OwnRows:
        if tokens not in self.kept:
            self.kept.clear()
            self.kept[tokens] = OwnRows(self.shape, tokens)
        return self.kept[tokens]
