"""Prompts by FlashAttention: 3 where ``flash_attn_interface`` is installed, else 2.

Both take views of our pool, ``[b, block_size, n, d]``; version 2 only where blocks are multiples
of 256 tokens. Written to their documentation.

Shapes: t tokens, r rows of the span, h query heads, n KV heads, d the key size, b blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...core.errors import ConfigError
from .base import DeviceRows, PromptPool, Span
from .library import LibraryPrompts, imported, there

_VERSION_3, _VERSION_2 = "flash_attn_interface", "flash_attn"
_BLOCK_2 = 256
"""Tokens that version 2's blocks are multiples of."""


@dataclass(frozen=True)
class _Rows:
    """A span's rows, on the device."""

    span: Span
    starts: torch.Tensor
    """int32 ``[r + 1]``, from 0."""
    tables_rb: torch.Tensor
    lengths_r: torch.Tensor
    key_starts: torch.Tensor
    """``lengths_r`` added up, ``[r + 1]``."""


class FlashAttnPrompts(LibraryPrompts):
    sizes = (64, 80, 96, 128, 256)

    @staticmethod
    def missing() -> str:
        if there(_VERSION_3) or there(_VERSION_2):
            return ""
        return (
            "it needs FlashAttention: pip install flash-attn, which takes a cache.block_size of "
            f"{_BLOCK_2} only, or build version 3 (module {_VERSION_3}), which takes any"
        )

    def __init__(self, pool: PromptPool) -> None:
        super().__init__(pool)
        self._rows: _Rows | None = None
        self._version_3 = there(_VERSION_3)
        if self._version_3:
            self._attend = imported(_VERSION_3).flash_attn_with_kvcache
            return
        if pool.layout.block_size % _BLOCK_2:
            raise ConfigError(
                f"cluster.prompt_attention flash-attn: version 2 reads blocks of {_BLOCK_2} tokens "
                f"only, and these have {pool.layout.block_size}: set cache.block_size to "
                f"{_BLOCK_2}, install version 3, or leave it out"
            )
        self._attend = imported(f"{_VERSION_2}.flash_attn_interface").flash_attn_varlen_func

    def _call(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spec, of = self._pool.layout.specs[layer], self._rows_of(span, rows)
        settings: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),
            "softcap": spec.softcap or 0.0,
            "max_seqlen_q": max(span.counts),
        }
        k_bsnd, v_bsnd = (side.transpose(1, 2) for side in self._pool.blocks(layer).unbind(1))
        if self._version_3:
            settings |= {"cache_seqlens": of.lengths_r, "page_table": of.tables_rb}
            settings |= {"cu_seqlens_q": of.starts, "return_softmax_lse": True}
        else:
            settings |= {"cu_seqlens_q": of.starts, "cu_seqlens_k": of.key_starts}
            settings |= {"max_seqlen_k": max(span.lengths), "block_table": of.tables_rb}
            settings["return_attn_probs"] = True
        o_thd, lse_ht, *_ = self._attend(q_thd, k_bsnd, v_bsnd, **settings)
        return o_thd, lse_ht.mT

    def _rows_of(self, span: Span, rows: DeviceRows) -> _Rows:
        """Made by a step's first layer."""
        if self._rows is None or self._rows.span is not span:
            end = span.rows.stop
            lengths_r = rows.lengths_r[span.rows]
            key_starts = torch.nn.functional.pad(lengths_r.cumsum(0), (1, 0))
            self._rows = _Rows(
                span,
                rows.query_starts[span.row : end + 1] - span.start,
                rows.block_tables_rb[span.rows],
                lengths_r,
                key_starts.to(torch.int32),
            )
        return self._rows
