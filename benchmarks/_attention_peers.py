"""Paged attention of other libraries, where they are there, over the pool that ours is timed on.

A block of the pool is keys ``[kv_heads, block, dim]`` and then values: views of it are the layouts
that they take. Written to their documentation; neither is a dependency of the project. Prompts go
through the ways that ``--prompt-attention`` offers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cloverinfer.attention.borrow import borrow_bytes
from cloverinfer.attention.prompts import find_prompt_attention
from cloverinfer.attention.prompts.base import DeviceRows, PromptAttention, PromptPool
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import PoolLayout
from cloverinfer.transport.base import DeviceMemory

Call = Callable[[], object]


@dataclass(frozen=True)
class Decode:
    """One shape's tensors: ``pool_n2hbd`` [blocks, 2, kv_heads, block, dim]; a table per call."""

    pool_n2hbd: torch.Tensor
    q_rhd: torch.Tensor
    tables: torch.Tensor
    lengths_r: torch.Tensor
    scale: float


def peers(decode: Decode) -> dict[str, list[Call]]:
    """Calls in turn by each library that is there; empty where none is."""
    found = {"flashinfer": _flashinfer, "flash_attn_interface": _flash_attention_3}
    found["flash_attn"] = _flash_attention_2
    return {
        name: calls(decode)
        for name, calls in found.items()
        if importlib.util.find_spec(name) is not None
    }


def _flashinfer(decode: Decode) -> list[Call]:
    import flashinfer

    _, _, kv_heads, block, dim = decode.pool_n2hbd.shape
    rows, heads, _ = decode.q_rhd.shape
    needed = (decode.lengths_r + block - 1) // block
    starts = torch.nn.functional.pad(needed.cumsum(0), (1, 0)).to(torch.int32)
    calls: list[Call] = []
    for table in decode.tables:
        blocks = torch.cat([table[row, : int(needed[row])] for row in range(rows)])
        work = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(work, "HND")
        wrapper.plan(
            starts,
            blocks,
            (decode.lengths_r - 1) % block + 1,
            heads,
            kv_heads,
            dim,
            block,
            q_data_type=decode.q_rhd.dtype,
            kv_data_type=decode.pool_n2hbd.dtype,
            sm_scale=decode.scale,
        )
        calls.append(lambda w=wrapper: w.run(decode.q_rhd, decode.pool_n2hbd))
    return calls


def _flash_attention_3(decode: Decode) -> list[Call]:
    from flash_attn_interface import flash_attn_with_kvcache

    return _flash_attention(decode, flash_attn_with_kvcache, "page_table")


def _flash_attention_2(decode: Decode) -> list[Call]:
    if decode.pool_n2hbd.shape[3] % 256:
        print("flash_attn 2 takes blocks that are multiples of 256 tokens only")
        return []
    from flash_attn import flash_attn_with_kvcache

    return _flash_attention(decode, flash_attn_with_kvcache, "block_table")


def _flash_attention(decode: Decode, attend: Callable[..., object], table: str) -> list[Call]:
    k_nbhd, v_nbhd = (side.transpose(1, 2) for side in decode.pool_n2hbd.unbind(1))
    settings = {"cache_seqlens": decode.lengths_r, "softmax_scale": decode.scale, "causal": True}
    return [
        lambda t=t: attend(decode.q_rhd[:, None], k_nbhd, v_nbhd, **settings, **{table: t})
        for t in decode.tables
    ]


def prompt_peers(
    memory: DeviceMemory, layout: PoolLayout, q_thd: torch.Tensor, rows: DeviceRows
) -> dict[str, Call]:
    """One call of layer 0 over one row, by each library that is there and takes the pool."""
    device = torch.device("cuda", memory.device)
    numbers = borrow_bytes(memory.pointer, memory.nbytes, device)
    pool = PromptPool(layout, q_thd.shape[1], numbers, _never)
    calls: dict[str, Call] = {}
    for name in ("flashinfer", "flash-attn"):
        try:
            way = _way(name, pool)
        except ConfigError as reason:
            print(reason)
            continue
        (span,) = way.spans(rows.query_starts.tolist(), rows.lengths_r.tolist())
        calls[name] = lambda way=way, span=span: way.attend(0, span, q_thd, rows)
    return calls


def _way(name: str, pool: PromptPool) -> PromptAttention:
    make = find_prompt_attention(name)
    assert make is not None
    return make(pool)


def _never(*_: object) -> tuple[torch.Tensor, torch.Tensor, float]:
    raise AssertionError("a library reads the pool as it is")
