"""FlashAttention and FlashInfer as far as their documentation goes, in plain torch on the CPU.

They take the arguments that ours are called with, read the pool through the strides that they are
given, and refuse what the libraries refuse.
"""

from __future__ import annotations

import math
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch

from cloverinfer.attention.rows import attend_plain
from cloverinfer.kvcache.layout import KVSpec


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(members)
    return made


def attend_pages(
    q_thd: torch.Tensor,
    starts: list[int],
    k_bsnd: torch.Tensor,
    v_bsnd: torch.Tensor,
    pages: list[torch.Tensor],
    lengths: list[int],
    **fields: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``o_the`` and ``lse_th``."""
    heads, size = k_bsnd.shape[2:]
    kinds = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
    spec = KVSpec(kv_heads=heads, k_dim=size, v_dim=size, dtype=kinds[k_bsnd.dtype], **fields)
    parts = []
    for row, length in enumerate(lengths):
        k, v = (x[pages[row]].flatten(0, 1)[:length].transpose(0, 1) for x in (k_bsnd, v_bsnd))
        parts.append(attend_plain(spec, q_thd[starts[row] : starts[row + 1]], k, v))
    return torch.cat([o for o, _ in parts]), torch.cat([lse for _, lse in parts])


def _window(size: tuple[int, int]) -> int | None:
    left, right = size
    assert (left == -1) == (right == -1)
    assert right <= 0
    return None if left == -1 else left + 1


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    cache_seqlens: torch.Tensor,
    page_table: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    return_softmax_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of version 3."""
    assert causal
    assert return_softmax_lse
    assert page_table.dtype == cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    needed = [-(-n // k_cache.shape[1]) for n in cache_seqlens.tolist()]
    o, lse_th = attend_pages(
        q,
        cu_seqlens_q.tolist(),
        k_cache,
        v_cache,
        [page_table[row, :n] for row, n in enumerate(needed)],
        cache_seqlens.tolist(),
        scale=softmax_scale,
        window=_window(window_size),
        softcap=softcap or None,
    )
    return o, lse_th.T


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_k: int,
    block_table: torch.Tensor,
    return_attn_probs: bool,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Of version 2."""
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_k == int(lengths.max())
    o, lse_ht = flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=lengths,
        page_table=block_table,
        return_softmax_lse=return_attn_probs,
        **others,
    )
    return o, lse_ht, None


class BatchPrefillWithPagedKVCacheWrapper:
    made = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        type(self).made += 1
        self.plans = 0

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert causal
        assert q_data_type == kv_data_type
        places = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        assert all(place.dtype == torch.int32 for place in places)
        self.plans += 1
        self.starts, at = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.pages = [paged_kv_indices[a:b] for a, b in pairwise(at)]
        last = paged_kv_last_page_len.tolist()
        self.lengths = [
            (len(pages) - 1) * page_size + n for pages, n in zip(self.pages, last, strict=True)
        ]
        self.sizes = num_qo_heads, num_kv_heads, page_size, head_dim_qk
        window = None if window_left == -1 else window_left + 1
        self.fields = {"scale": sm_scale, "window": window, "softcap": logits_soft_cap}

    def run(
        self, q: torch.Tensor, paged_kv_cache: torch.Tensor, *, return_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert return_lse
        assert q.shape[:2] == (self.starts[-1], self.sizes[0])
        assert paged_kv_cache.shape[1:] == (2, *self.sizes[1:])
        k_bsnd, v_bsnd = (side.transpose(1, 2) for side in paged_kv_cache.unbind(1))
        o, lse = attend_pages(
            q, self.starts, k_bsnd, v_bsnd, self.pages, self.lengths, **self.fields
        )
        return o, lse / math.log(2)


def flash_attn_3() -> dict[str, ModuleType]:
    name = "flash_attn_interface"
    return {name: module(name, flash_attn_with_kvcache=flash_attn_with_kvcache)}


def flash_attn_2() -> dict[str, ModuleType]:
    inner = "flash_attn.flash_attn_interface"
    return {
        "flash_attn": module("flash_attn", __path__=[]),
        inner: module(inner, flash_attn_varlen_func=flash_attn_varlen_func),
    }


def flashinfer() -> dict[str, ModuleType]:
    wrapper = type("Wrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"made": 0})
    return {"flashinfer": module("flashinfer", BatchPrefillWithPagedKVCacheWrapper=wrapper)}
