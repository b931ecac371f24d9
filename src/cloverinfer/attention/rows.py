"""One row's causal attention over gathered keys and values, in torch.

``attend_plain`` is the reference: softmax written out, every feature of a KV spec. ``attend_fast``
is for prompts and chunks: torch's fused kernel where a spec allows it, else the reference.

Shapes: t query tokens of the row, h query heads, n KV heads, d the key size, e the value size,
l context tokens, c query tokens that are computed at a time. The last query token is at the last
context position.
"""

from __future__ import annotations

import functools
import math

import torch

from ..kvcache.layout import KVSpec

_SCORES_AT_A_TIME = 1 << 24
"""Most scores that the reference holds at once (64 MiB in float32)."""

Result = tuple[torch.Tensor, torch.Tensor]
"""o ``[t, h, e]`` and lse ``[t, h]`` float32."""


def first_visible(spec: KVSpec, queries: int, length: int) -> int:
    """First context position that any of the last ``queries`` tokens sees."""
    return 0 if spec.window is None else max(0, length - queries - spec.window + 1)


def attend_plain(
    spec: KVSpec, q_thd: torch.Tensor, k_nld: torch.Tensor, v_nle: torch.Tensor
) -> Result:
    """Computed in float32; ``o`` in q's type."""
    queries, heads, _ = q_thd.shape
    kv_heads, length, _ = k_nld.shape
    k_nld, v_nle = k_nld.float(), v_nle.float()
    step = max(1, _SCORES_AT_A_TIME // (heads * length))
    parts = []
    for at in range(0, queries, step):
        q_chd = q_thd[at : at + step].float()
        q_ncgd = q_chd.reshape(-1, kv_heads, heads // kv_heads, q_chd.shape[2]).transpose(0, 1)
        key_ends = length - queries + at + 1 + torch.arange(q_chd.shape[0])
        parts.append(_attend_chunk(spec, q_ncgd, k_nld, v_nle, key_ends))
    o_the = torch.cat([o for o, _ in parts]).to(q_thd.dtype)
    return o_the, torch.cat([lse for _, lse in parts])


def _attend_chunk(
    spec: KVSpec,
    q_ncgd: torch.Tensor,
    k_nld: torch.Tensor,
    v_nle: torch.Tensor,
    key_ends_c: torch.Tensor,
) -> Result:
    """Query token i sees context positions below ``key_ends_c[i]``."""
    kv_heads, _, group, _ = q_ncgd.shape
    length, v_dim = v_nle.shape[1:]
    scores_ncgl = (q_ncgd.flatten(1, 2) @ k_nld.mT).view(kv_heads, -1, group, length) * spec.scale
    if spec.softcap is not None:
        scores_ncgl = spec.softcap * torch.tanh(scores_ncgl / spec.softcap)
    distance_cl = torch.arange(length) - (key_ends_c - 1)[:, None]
    if spec.alibi_slopes is not None:
        slopes_ng = torch.tensor(spec.alibi_slopes).view(kv_heads, 1, group, 1)
        scores_ncgl = scores_ncgl + slopes_ng * distance_cl[:, None]
    hidden_cl = distance_cl > 0
    if spec.window is not None:
        hidden_cl |= distance_cl <= -spec.window
    scores_ncgl = scores_ncgl.masked_fill(hidden_cl[:, None], -math.inf)
    lse_ncg = scores_ncgl.logsumexp(-1)
    if spec.sinks is not None:
        lse_ncg = torch.logaddexp(lse_ncg, torch.tensor(spec.sinks).view(kv_heads, 1, group))
    weights_ncgl = (scores_ncgl - lse_ncg[..., None]).exp()
    o_ncge = (weights_ncgl.flatten(1, 2) @ v_nle).view(kv_heads, -1, group, v_dim)
    return o_ncge.transpose(0, 1).flatten(1, 2), lse_ncg.transpose(0, 1).flatten(1, 2)


def attend_fast(
    spec: KVSpec, q_thd: torch.Tensor, k_nld: torch.Tensor, v_nle: torch.Tensor
) -> Result:
    """Like ``attend_plain``, for many query tokens. Within the fused kernel products of 16-bit
    types are of that type.
    """
    queries, (_, length, k_dim) = q_thd.shape[0], k_nld.shape
    special = spec.softcap is not None or spec.sinks is not None or spec.alibi_slopes is not None
    if special or k_dim != v_nle.shape[2]:
        return attend_plain(spec, q_thd, k_nld, v_nle)
    if spec.window is not None and length > spec.window:
        mask_tl = _window_mask(spec.window, queries, length, q_thd.dtype)
        return _fused(q_thd, k_nld, v_nle, spec.scale, mask_tl=mask_tl)
    if length == queries:
        return _fused(q_thd, k_nld, v_nle, spec.scale, causal=True)
    before = length - queries
    prefix = _fused(q_thd, k_nld[:, :before], v_nle[:, :before], spec.scale)
    chunk = _fused(q_thd, k_nld[:, before:], v_nle[:, before:], spec.scale, causal=True)
    return merge(prefix, chunk)


def merge(a: Result, b: Result) -> Result:
    """Attention over two disjoint contexts, from attention over each."""
    (o_a, lse_a), (o_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a.float() * (lse_a - lse).exp()[..., None] + o_b.float() * (lse_b - lse).exp()[..., None]
    return o.to(o_a.dtype), lse


def merge_sinks(spec: KVSpec, o_the: torch.Tensor, lse_th: torch.Tensor) -> Result:
    """A result without sinks, with the spec's."""
    if spec.sinks is None:
        return o_the, lse_th
    lse = torch.logaddexp(lse_th, _sinks_on(spec.sinks, lse_th.device))
    return (o_the.float() * (lse_th - lse).exp()[..., None]).to(o_the.dtype), lse


@functools.lru_cache(maxsize=1024)
def _sinks_on(sinks: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Copied once: a copy to a device waits for what it is doing."""
    return torch.tensor(sinks, device=device)


def _window_mask(window: int, queries: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    """0 where the query sees the position, else minus infinity."""
    query_at = torch.arange(length - queries, length)[:, None]
    distance_tl = torch.arange(length) - query_at
    hidden_tl = (distance_tl > 0) | (distance_tl <= -window)
    return torch.zeros((), dtype=dtype).masked_fill(hidden_tl, -math.inf)


def _fused(
    q_thd: torch.Tensor,
    k_nld: torch.Tensor,
    v_nle: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
    mask_tl: torch.Tensor | None = None,
) -> Result:
    """The kernel behind ``F.scaled_dot_product_attention`` on the CPU, which also gives lse."""
    group = q_thd.shape[1] // k_nld.shape[0]
    o_1hte, lse_1ht = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_thd.transpose(0, 1)[None],
        k_nld.repeat_interleave(group, 0)[None],
        v_nle.repeat_interleave(group, 0)[None],
        0.0,
        causal,
        attn_mask=mask_tl,
        scale=scale,
    )
    return o_1hte[0].transpose(0, 1), lse_1ht[0].transpose(0, 1)
