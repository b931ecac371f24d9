"""Prompts by FlashInfer's paged prefill, which takes our pool as its layout ``HND``.

Its kernels depend on type, head size, window and soft-cap: each kind that layers have gets a
wrapper of its own, which loads them (and compiles them, once on a host, where they did not come
with the package) while the pool is made. A wrapper is planned by a step's first layer that uses
it. Written to its documentation.

Shapes: t tokens, r rows of the span, h query heads, d the key size, b blocks.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from ...core.errors import CloverError
from ...kvcache.layout import KVSpec, blocks_for
from .base import STORED, DeviceRows, PromptPool, Span
from .library import LibraryPrompts, imported, there

_WORKSPACE = 128 << 20
"""Bytes that it asks for its partial results."""
_WAIT_SECONDS = 300.0
_NAP_SECONDS = 20e-6


class FlashInferPrompts(LibraryPrompts):
    sizes = (64, 128, 256)

    @staticmethod
    def missing() -> str:
        return "" if there("flashinfer") else "it needs FlashInfer: pip install flashinfer-python"

    def __init__(self, pool: PromptPool) -> None:
        super().__init__(pool)
        make = imported("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        served = [spec for spec in pool.layout.specs if self.serves(spec)]
        # Calls are in order, so that all may use the same one.
        workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=pool.memory.device)
        self._kinds = {spec: _Kind(make(workspace, "HND"), spec, pool) for spec in set(served)}
        for layer, spec in enumerate(pool.layout.specs):
            if spec in served:
                self._kinds[spec].load(pool.blocks(layer))

    def _call(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = self._kinds[self._pool.layout.specs[layer]]
        return kind.attend(span, q_thd, rows, self._pool.blocks(layer))


class _Kind:
    """A wrapper, and what it was planned for last."""

    def __init__(self, wrapper: Any, spec: KVSpec, pool: PromptPool) -> None:
        self._wrapper, self._spec = wrapper, spec
        self._heads, self._block_size = pool.num_heads, pool.layout.block_size
        self._span: Span | None = None
        self._sent = torch.cuda.Event() if pool.memory.is_cuda else None
        """After what the last plan copies."""

    def load(self, blocks: torch.Tensor) -> None:
        """All that a call needs, by a first one of one token: seconds to minutes, once."""
        if self._span is None:
            spec, device = self._spec, blocks.device
            q_thd = torch.zeros(
                (1, self._heads, spec.k_dim), dtype=STORED[spec.dtype], device=device
            )
            zeros = torch.zeros((1, 1), dtype=torch.int32, device=device)
            rows = DeviceRows(zeros[0], zeros, zeros[0])
            self.attend(Span(0, 0, (1,), (1,)), q_thd, rows, blocks)

    def attend(
        self, span: Span, q_thd: torch.Tensor, rows: DeviceRows, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._span is not span:
            needed = [blocks_for(length, self._block_size) for length in span.lengths]
            tables_rb = rows.block_tables_rb[span.rows]
            self._plan(span, torch.cat([tables_rb[row, :n] for row, n in enumerate(needed)]))
            self._span = span
        o_thd, log2_th = self._wrapper.run(q_thd, blocks, return_lse=True)
        return o_thd, log2_th * math.log(2)

    def _plan(self, span: Span, indices: torch.Tensor) -> None:
        """``indices`` of blocks, on the device; all else is the host's, so that nothing waits."""
        size, spec = self._block_size, self._spec
        self._wait_for_the_last()
        needed = [blocks_for(length, size) for length in span.lengths]
        self._wrapper.plan(
            _starts(span.counts),
            _starts(needed),
            indices,
            torch.tensor([(n - 1) % size + 1 for n in span.lengths], dtype=torch.int32),
            self._heads,
            spec.kv_heads,
            spec.k_dim,
            size,
            causal=True,
            sm_scale=spec.scale,
            window_left=-1 if spec.window is None else spec.window - 1,
            logits_soft_cap=spec.softcap,
            q_data_type=STORED[spec.dtype],
            kv_data_type=STORED[spec.dtype],
        )
        if self._sent is not None:
            self._sent.record()

    def _wait_for_the_last(self) -> None:
        """A wrapper has one page-locked buffer, which the device may not have read yet: only where
        a step is planned before the one before it has begun."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while self._sent is not None and not self._sent.query():
            if time.monotonic() > deadline:
                raise CloverError(f"the device did not take a plan within {_WAIT_SECONDS:g} s")
            time.sleep(_NAP_SECONDS)


def _starts(counts: Any) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
