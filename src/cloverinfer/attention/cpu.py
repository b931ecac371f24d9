"""The CPU backend: paged attention in C++.

The C++ side has threads of its own, which sleep between calls. Where it does not serve prompts
best, rows of more than a few query tokens are gathered and go through ``rows.attend_fast``, on
torch's threads. Both read one pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _native
from ..core.errors import ConfigError
from ..kvcache.layout import KVSpec, PoolLayout
from ..transport.base import DeviceMemory
from .base import AttentionBackend, Capabilities, NativeAttention
from .pool import ALL_FEATURES, DTYPES, STORED, Pool, check_floats, check_layout
from .rows import attend_fast, first_visible

_CODES = {"float32": 0, "bfloat16": 1, "float16": 2, "int8": 3}
"""``clover::attention::DType``."""
_CODE_OF = {dtype: _CODES[name] for name, dtype in DTYPES.items()}
HEAD_SIZE_STEP = 8
_FUSED_QUERIES = 8
"""Rows of more query tokens go to torch's kernel where ours does not serve prompts best."""
_ANY_QUERIES = 1 << 30


@dataclass(frozen=True)
class _Layer:
    """What a call needs to know of its layer, looked up once."""

    spec: KVSpec
    q_token: tuple[int, int]
    k_token: tuple[int, int]
    v_token: tuple[int, int]
    o_token: tuple[int, int]
    prompts: frozenset[torch.dtype]
    """Types of queries whose prompts the kernels serve best too."""


class CpuAttention(AttentionBackend):
    """``threads`` compute threads, the caller's included; ``isa`` forces an instruction set
    (``auto``, or one of ``_native.attention_isas()``), for tests.
    """

    capabilities = Capabilities(
        name="cpu",
        device="cpu",
        dtypes=STORED,
        direct_puts=True,
        features=ALL_FEATURES,
        converts=True,
    )

    def __init__(self, threads: int = 1, isa: str = "auto") -> None:
        self._threads = threads
        self._isa = isa
        self._pool: Pool | None = None
        self._native: _native.CpuAttentionPool | None = None
        self._layers: list[_Layer] = []
        self._heads = 0

    def allocate(
        self, layout: PoolLayout, num_heads: int, buffer: memoryview | DeviceMemory | None = None
    ) -> None:
        check_layout(self.capabilities, layout, num_heads)
        _check_head_sizes(layout)
        pool = Pool(layout, buffer)
        native = _native.CpuAttentionPool(
            threads=self._threads,
            isa=self._isa,
            pool=pool.bytes.data_ptr(),
            pool_bytes=pool.bytes.numel(),
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
        )
        for spec in layout.specs:
            _add_layer(native, spec, num_heads)
        self._layers = [
            _layer(spec, num_heads, _prompts(native.isa(i))) for i, spec in enumerate(layout.specs)
        ]
        self._pool, self._native, self._heads = pool, native, num_heads

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        native, of = self._open(), self._layers[layer]
        tokens = slots_t.shape[0]
        _check_index("slots", slots_t, torch.int64)
        check_floats("k", k_tnd, (tokens, *of.k_token))
        check_floats("v", v_tne, (tokens, *of.v_token))
        if k_tnd.dtype != v_tne.dtype:
            raise ValueError(f"k and v must be of one type, not {k_tnd.dtype} and {v_tne.dtype}")
        native.append(
            layer,
            _CODE_OF[k_tnd.dtype],
            k_tnd.data_ptr(),
            k_tnd.stride(0),
            v_tne.data_ptr(),
            v_tne.stride(0),
            slots_t.data_ptr(),
            tokens,
        )

    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        native, of = self._open(), self._layers[layer]
        tokens, rows = q_thd.shape[0], lengths_r.shape[0]
        check_floats("q", q_thd, (tokens, *of.q_token))
        _check_rows(query_starts, block_tables_rb, lengths_r)
        most_queries = _most_queries(of, q_thd.dtype)
        o_the = torch.empty(tokens, *of.o_token, dtype=q_thd.dtype)
        lse_th = torch.empty(tokens, of.o_token[0])
        native.attend(
            layer,
            _CODE_OF[q_thd.dtype],
            q_thd.data_ptr(),
            q_thd.stride(0),
            query_starts.data_ptr(),
            block_tables_rb.data_ptr(),
            block_tables_rb.shape[1],
            lengths_r.data_ptr(),
            rows,
            tokens,
            o_the.data_ptr(),
            lse_th.data_ptr(),
            most_queries,
        )
        if most_queries and tokens > rows:
            starts, lengths = query_starts.tolist(), lengths_r.tolist()
            for row in range(rows):
                at = slice(starts[row], starts[row + 1])
                if at.stop - at.start > most_queries:
                    o_the[at], lse_th[at] = self._attend_prompt(
                        layer, q_thd[at], block_tables_rb[row], lengths[row]
                    )
        return o_the, lse_th

    def _attend_prompt(
        self, layer: int, q_thd: torch.Tensor, table_b: torch.Tensor, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._pool is not None
        spec = self._layers[layer].spec
        first = first_visible(spec, q_thd.shape[0], length)
        k_nld, v_nle = self._pool.gather(layer, table_b, first, length)
        return attend_fast(spec, q_thd, k_nld.to(q_thd.dtype), v_nle.to(q_thd.dtype))

    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        self._open()
        assert self._pool is not None
        return self._pool.export_blocks(blocks)

    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        self._open()
        assert self._pool is not None
        self._pool.import_blocks(blocks, data)

    def native(self) -> NativeAttention | None:
        prompts = all(torch.bfloat16 in of.prompts for of in self._layers)
        return NativeAttention(self._open().table(), _ANY_QUERIES if prompts else _FUSED_QUERIES)

    def close(self) -> None:
        self._native = None  # joins its threads before the pool can go
        self._pool = None

    def _open(self) -> _native.CpuAttentionPool:
        assert self._native is not None, "allocate comes first, and nothing after close"
        return self._native


def _check_head_sizes(layout: PoolLayout) -> None:
    for layer, spec in enumerate(layout.specs):
        for field in ("k_dim", "v_dim"):
            value = getattr(spec, field)
            if value % HEAD_SIZE_STEP:
                raise ConfigError(
                    f"specs[{layer}].{field} must be a multiple of {HEAD_SIZE_STEP} "
                    f"for the cpu backend, not {value}"
                )


def _add_layer(native: _native.CpuAttentionPool, spec: KVSpec, num_heads: int) -> None:
    native.add_layer(
        dtype=_CODES[spec.dtype],
        kv_heads=spec.kv_heads,
        group=num_heads // spec.kv_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        scale=spec.scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        sinks=list(spec.sinks or ()),
        alibi_slopes=list(spec.alibi_slopes or ()),
    )


def _most_queries(of: _Layer, dtype: torch.dtype) -> int:
    """Of rows that the native kernels serve best; 0: they serve all."""
    best = dtype in of.prompts or DTYPES.get(of.spec.dtype) != dtype
    return 0 if best else _FUSED_QUERIES


def _prompts(isa: str) -> frozenset[torch.dtype]:
    """With AVX2 bfloat16: then products are native too, and torch's threads, which stay awake for a
    while after each of its calls, would be in their way."""
    if isa not in ("portable", "avx2"):
        return frozenset(_CODE_OF)
    return frozenset({torch.bfloat16} if isa == "avx2" else ())


def _layer(spec: KVSpec, num_heads: int, prompts: frozenset[torch.dtype]) -> _Layer:
    return _Layer(
        spec=spec,
        q_token=(num_heads, spec.k_dim),
        k_token=(spec.kv_heads, spec.k_dim),
        v_token=(spec.kv_heads, spec.v_dim),
        o_token=(num_heads, spec.v_dim),
        prompts=prompts,
    )


def _check_rows(starts: torch.Tensor, tables_rb: torch.Tensor, lengths_r: torch.Tensor) -> None:
    _check_index("query_starts", starts, torch.int32)
    _check_index("lengths", lengths_r, torch.int32)
    rows = lengths_r.shape[0]
    if starts.shape[0] != rows + 1:
        raise ValueError(f"query_starts must have {rows + 1} entries, not {starts.shape[0]}")
    if tables_rb.dtype != torch.int32 or not tables_rb.is_contiguous():
        raise ValueError(f"block_tables must be contiguous int32, not {tables_rb.dtype}")
    if tables_rb.ndim != 2 or tables_rb.shape[0] != rows:
        raise ValueError(f"block_tables must be [{rows}, blocks], not {list(tables_rb.shape)}")


def _check_index(name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype or x.ndim != 1 or not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous {dtype} [n], not {x.dtype} {list(x.shape)}")
