"""The CUDA backend: our kernels, but for prompts that another way serves (``prompts``).

torch only owns the tensors here; kernels get addresses, on torch's current stream. A call reads
lengths, block tables and slots on the device, so one that holds no fresh prompt can be captured in
a CUDA graph, whose shapes then stay. Rows of length 0 are left out: their output is not written.

A token of slot -1 is not stored. Other indices are checked where they are used: one outside the
pool is not followed (a slot is not written, a block counts as hidden), and the next call raises
``ValueError`` for it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .. import _native
from ..core.errors import ConfigError
from ..kvcache.layout import KVSpec, PoolLayout
from ..transport.base import DeviceMemory
from .base import (
    AttentionBackend,
    Capabilities,
    FusedRows,
    HostRows,
    RotatesOnAppend,
)
from .borrow import borrow_bytes
from .pool import ALL_FEATURES, check_blocks, check_import, check_layout, check_tokens
from .prompts import find_prompt_attention
from .prompts.base import STORED, DeviceRows, Planned, PromptAttention, PromptPool, Span, plan_spans

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""``clover::cuda::DType``."""
_WIDE = (torch.bfloat16, torch.float16)
"""What layers of float8 take and give."""
ALIGNMENT = 256
"""Bytes of the pool's address."""
_BAD = {1: "a block table named a block", 2: "an append named a slot"}


@dataclass(frozen=True)
class _Layer:
    """What a call needs to know of its layer, looked up once."""

    spec: KVSpec
    stored: torch.dtype
    taken: tuple[torch.dtype, ...]
    """Types of q."""
    prompts: bool
    """Its prompts may be another way's than our kernels'."""


class CudaAttention(AttentionBackend, RotatesOnAppend):
    """On torch's current device at ``allocate``. ``threads`` is not used. ``batch_invariant``: a
    row's result does not depend on which rows it shares a call with (fixed splits, one kernel).
    ``prompt_attention``: who attends over prompts, see ``ClusterConfig``; under ``batch_invariant``
    our kernels do. ``shared_limit``: bytes of shared memory that kernels may take; 0: what the
    device has. Less makes it choose as it would on a smaller one.
    """

    capabilities = Capabilities(
        name="cuda",
        device="cuda",
        dtypes=tuple(STORED),
        direct_puts=True,
        features=ALL_FEATURES,
        checks_late=True,
    )

    def __init__(
        self,
        threads: int = 1,
        batch_invariant: bool = False,
        prompt_attention: str = "auto",
        shared_limit: int = 0,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.prompt_attention = "own" if batch_invariant else prompt_attention
        self._make_prompts = find_prompt_attention(self.prompt_attention)
        self._prompts: PromptAttention | None = None
        self._shared_limit = shared_limit
        self._native: _native.CudaAttentionPool | None = None
        self._layers: list[_Layer] = []
        self._heads = 0
        self._plans: torch.Tensor | None = None
        """Lengths of the rows that ``_planned`` is of."""
        self._planned: Planned | None = None
        self._appended: tuple[int, torch.Tensor, torch.Tensor] | None = None
        """Layer, keys and values of the last call, where a plan has use for them."""

    def allocate(
        self, layout: PoolLayout, num_heads: int, buffer: memoryview | DeviceMemory | None = None
    ) -> None:
        check_layout(self.capabilities, layout, num_heads)
        reason = missing()
        if reason:
            raise ConfigError(f"attention backend cuda cannot be used: {reason}")
        self._device, address = self._take_memory(layout, buffer)
        native = _native.CudaAttentionPool(
            device=self._device.index,
            pool=address,
            pool_bytes=layout.total_bytes,
            block_size=layout.block_size,
            num_blocks=layout.num_blocks,
            fixed_splits=self.batch_invariant,
            shared_limit=self._shared_limit,
        )
        for spec in layout.specs:
            _add_layer(native, spec, num_heads)
        self._layout, self._native, self._heads, self._base = layout, native, num_heads, address
        if self._make_prompts is not None:
            memory = borrow_bytes(address, layout.total_bytes, self._device)
            pool = PromptPool(layout, num_heads, memory, self._keys_values)
            self._prompts = self._make_prompts(pool)
        self._layers = [_layer(spec, self._prompts) for spec in layout.specs]

    def memory(self) -> DeviceMemory:
        """The pool, to be registered with an endpoint."""
        self._open()
        return DeviceMemory(self._base, self._layout.total_bytes, self._device.index)

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        native, of = self._open(), self._layers[layer]
        tokens, spec = slots_t.shape[0], of.spec
        self._check_index("slots", slots_t, torch.int64)
        dtype = k_tnd.dtype if k_tnd.dtype in of.taken else of.stored
        check_tokens("k", k_tnd, (tokens, spec.kv_heads, spec.k_dim), dtype)
        check_tokens("v", v_tne, (tokens, spec.kv_heads, spec.v_dim), dtype)
        self._check_devices(k=k_tnd, v=v_tne)
        native.append(
            layer,
            self._stream(),
            _CODES[dtype],
            k_tnd.data_ptr(),
            k_tnd.stride(0),
            v_tne.data_ptr(),
            v_tne.stride(0),
            slots_t.data_ptr(),
            tokens,
        )
        if self._planned is not None:
            self._appended = layer, k_tnd, v_tne

    def append_rotated(self, layer: int, rows: FusedRows, slots_t: torch.Tensor) -> torch.Tensor:
        native, spec = self._open(), self._layers[layer].spec
        self._appended = None  # its keys are not rotated; prompts are read back from the pool
        qkv, (cos, sin), norm = rows.qkv_thd, rows.rope, rows.norm_hd
        tokens, heads = qkv.shape[0], self._heads + 2 * spec.kv_heads
        self._check_index("slots", slots_t, torch.int64)
        self._check_index("positions", rows.positions_t, torch.int64)
        check_tokens("qkv", qkv, (tokens, heads, spec.k_dim), qkv.dtype)
        assert qkv.dtype in self._layers[layer].taken
        assert slots_t.shape == rows.positions_t.shape == (tokens,)
        assert cos.dtype == sin.dtype == qkv.dtype
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        self._check_devices(qkv=qkv, cos=cos, sin=sin)
        if tokens:
            native.append_rotated(
                layer,
                self._stream(),
                _CODES[qkv.dtype],
                tokens,
                (self._heads, spec.kv_heads, spec.k_dim),
                rows.eps,
                (qkv.data_ptr(), qkv.stride(0)),
                rows.positions_t.data_ptr(),
                (cos.data_ptr(), sin.data_ptr(), cos.shape[0]),
                0 if norm is None else norm.data_ptr(),
                slots_t.data_ptr(),
            )
        return rows.parts[0]

    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._open()
        of, tokens = self._layers[layer], q_thd.shape[0]
        dtype = q_thd.dtype if q_thd.dtype in of.taken else of.taken[0]
        check_tokens("q", q_thd, (tokens, self._heads, of.spec.k_dim), dtype)
        self._check_rows(query_starts, block_tables_rb, lengths_r)
        self._check_devices(q=q_thd)
        planned = self._prompts_of(of, q_thd, query_starts, lengths_r)
        rows = DeviceRows(query_starts, block_tables_rb, lengths_r)
        if planned is not None and planned.all_rows and len(planned.spans) == 1:
            assert self._prompts is not None
            return self._prompts.attend(layer, planned.spans[0], q_thd, rows)
        o_the = torch.empty((tokens, self._heads, of.spec.v_dim), dtype=dtype, device=self._device)
        lse_th = torch.empty((tokens, self._heads), device=self._device)
        if planned is None:
            self._attend_paged(layer, q_thd, rows, (o_the, lse_th))
            return o_the, lse_th
        if not planned.all_rows:
            rest = DeviceRows(query_starts, block_tables_rb, planned.rest_r)
            self._attend_paged(layer, q_thd, rest, (o_the, lse_th))
        assert self._prompts is not None
        for span in planned.spans:
            at = span.tokens
            o_the[at], lse_th[at] = self._prompts.attend(layer, span, q_thd[at], rows)
        return o_the, lse_th

    def _attend_paged(
        self,
        layer: int,
        q_thd: torch.Tensor,
        rows: DeviceRows,
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._open().attend(
            layer,
            self._stream(),
            _CODES[q_thd.dtype],
            q_thd.data_ptr(),
            q_thd.stride(0),
            rows.query_starts.data_ptr(),
            rows.block_tables_rb.data_ptr(),
            rows.block_tables_rb.shape[1],
            rows.lengths_r.data_ptr(),
            rows.lengths_r.shape[0],
            q_thd.shape[0],
            out[0].data_ptr(),
            out[1].data_ptr(),
        )

    def settle_rows(self) -> None:
        """Promises that rows' lengths, starts and tables are never written by the launch just
        before a call. Without it that is taken to be so of calls right after an append only.
        """
        self._open().settle_rows(True)

    def plan(self, rows: HostRows, lengths_r: torch.Tensor | None) -> None:
        self._open()
        self._planned = self._appended = None
        self._plans = lengths_r
        if lengths_r is not None and any(of.prompts for of in self._layers):
            self._planned = self._spans_of(rows[0], rows[1], lengths_r)

    def _prompts_of(
        self, of: _Layer, q_thd: torch.Tensor, query_starts: torch.Tensor, lengths_r: torch.Tensor
    ) -> Planned | None:
        """Rows that are another way's than our kernels'. Waits for the device where the call may
        hold one and nobody planned it."""
        if not of.prompts:
            return None
        if self._plans is lengths_r:
            return self._planned
        assert self._prompts is not None
        if q_thd.shape[0] - lengths_r.shape[0] + 1 < self._prompts.least:
            return None
        if torch.cuda.is_current_stream_capturing():
            return None
        self._open().rows_changed()  # by what follows, after the append
        return self._spans_of(query_starts, lengths_r, lengths_r)

    def _spans_of(
        self, query_starts: torch.Tensor, lengths: torch.Tensor, lengths_r: torch.Tensor
    ) -> Planned | None:
        assert self._prompts is not None
        return plan_spans(self._prompts, query_starts.tolist(), lengths.tolist(), lengths_r)

    def _keys_values(
        self, layer: int, span: Span, dtype: torch.dtype, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor, float]:
        """See ``prompts.base.KeysValues``."""
        spec = self._layers[layer].spec
        appended = self._just_appended(layer, span, dtype)
        if appended is not None:
            return *appended, spec.scale
        # Gathered as stored, which is exact.
        return *self._gathered(layer, span, dtype, rows.block_tables_rb), spec.scale * spec.k_scale

    def _just_appended(
        self, layer: int, span: Span, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Keys and values of prompts that this step appended and whose numbers the pool holds as
        they are: ``[p, n, t, d]``."""
        if self._appended is None or self._appended[0] != layer:
            return None
        shape = (len(span.counts), span.lengths[0])
        _, k_tnd, v_tne = self._appended
        k, v = (x[span.tokens].unflatten(0, shape).transpose(1, 2) for x in (k_tnd, v_tne))
        return (k, v) if k.dtype == self._layers[layer].stored == dtype else None

    def _gathered(
        self, layer: int, span: Span, dtype: torch.dtype, block_tables_rb: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the prompts ``[p, n, t, d]``, out of the pool."""
        spec = self._layers[layer].spec
        count, length = len(span.counts), span.lengths[0]
        shape = (count, spec.kv_heads, length)
        k_pntd = torch.empty((*shape, spec.k_dim), dtype=dtype, device=self._device)
        v_pnte = torch.empty((*shape, spec.v_dim), dtype=dtype, device=self._device)
        for i in range(count):
            self._open().gather(
                layer,
                self._stream(),
                _CODES[dtype],
                block_tables_rb[span.row + i].data_ptr(),
                0,
                length,
                k_pntd[i].data_ptr(),
                v_pnte[i].data_ptr(),
            )
        return k_pntd, v_pnte

    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        native, layout = self._open(), self._layout
        check_blocks(layout, blocks)
        data = torch.empty(layout.block_bytes * len(blocks), dtype=torch.uint8, device=self._device)
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        at = data.data_ptr()
        for layer in range(layout.num_layers):
            size = layout.layer_block_bytes(layer)
            pool = self._base + layout.layer_offsets[layer]
            native.copy_blocks(self._stream(), pool, index.data_ptr(), at, 0, size, len(blocks))
            at += size * len(blocks)
        return data

    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        native, layout = self._open(), self._layout
        check_import(layout, blocks, data)
        check_blocks(layout, blocks)
        data = data.to(self._device).contiguous()
        index = torch.tensor(blocks, dtype=torch.int64, device=self._device)
        at = data.data_ptr()
        for layer in range(layout.num_layers):
            size = layout.layer_block_bytes(layer)
            pool = self._base + layout.layer_offsets[layer]
            native.copy_blocks(self._stream(), at, 0, pool, index.data_ptr(), size, len(blocks))
            at += size * len(blocks)

    def close(self) -> None:
        if self._native is not None:
            torch.cuda.synchronize(self._device)  # nothing may still use the workspace
        self._native = self._plans = self._planned = self._appended = self._prompts = None
        self._own = None

    def _take_memory(
        self, layout: PoolLayout, buffer: memoryview | DeviceMemory | None
    ) -> tuple[torch.device, int]:
        """The device and the pool's address."""
        self._own: torch.Tensor | None = None
        if buffer is None:
            device = torch.device("cuda", torch.cuda.current_device())
            self._own = torch.empty(layout.total_bytes, dtype=torch.uint8, device=device)
            return device, self._own.data_ptr()
        if not isinstance(buffer, DeviceMemory):
            raise ConfigError("buffer must be device memory for the cuda backend, not the host's")
        if buffer.nbytes < layout.total_bytes:
            raise ConfigError(
                f"buffer must hold at least {layout.total_bytes} bytes, not {buffer.nbytes}"
            )
        if buffer.pointer % ALIGNMENT:
            raise ConfigError(f"buffer must be aligned to {ALIGNMENT} bytes")
        return torch.device("cuda", buffer.device), buffer.pointer

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _open(self) -> _native.CudaAttentionPool:
        assert self._native is not None, "allocate comes first, and nothing after close"
        bad = self._native.take_bad()
        if bad:
            most = self._layout.num_blocks * (1 if bad == 1 else self._layout.block_size)
            raise ValueError(f"{_BAD[bad]} outside the pool, whose are from 0 to {most - 1}")
        return self._native

    def _check_rows(
        self, starts: torch.Tensor, tables_rb: torch.Tensor, lengths_r: torch.Tensor
    ) -> None:
        self._check_index("query_starts", starts, torch.int32)
        self._check_index("lengths", lengths_r, torch.int32)
        rows = lengths_r.shape[0]
        if starts.shape[0] != rows + 1:
            raise ValueError(f"query_starts must have {rows + 1} entries, not {starts.shape[0]}")
        if tables_rb.dtype != torch.int32 or not tables_rb.is_contiguous():
            raise ValueError(f"block_tables must be contiguous int32, not {tables_rb.dtype}")
        if tables_rb.ndim != 2 or tables_rb.shape[0] != rows:
            raise ValueError(f"block_tables must be [{rows}, blocks], not {list(tables_rb.shape)}")
        self._check_devices(block_tables=tables_rb)

    def _check_index(self, name: str, x: torch.Tensor, dtype: torch.dtype) -> None:
        if x.dtype != dtype or x.ndim != 1 or not x.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous {dtype} [n], not {x.dtype} {list(x.shape)}"
            )
        self._check_devices(**{name: x})

    def _check_devices(self, **tensors: torch.Tensor) -> None:
        for name, x in tensors.items():
            if x.device != self._device:
                raise ValueError(f"{name} must be on {self._device}, not on {x.device}")


def missing() -> str:
    """Why this host cannot use the backend, with what to do about it; empty where it can."""
    if not _native.CUDA_BUILT:
        return "this build has no CUDA kernels: install nvcc 12 or newer and build again"
    if not torch.cuda.is_available():
        return "torch finds no GPU: install its CUDA build and a driver, or use the cpu backend"
    driver, runtime = (version // 1000 for version in _native.cuda_versions())
    if driver < runtime:
        return (
            f"the driver serves CUDA {driver} and these kernels were built with CUDA {runtime}: "
            f"install a newer driver, or build again with nvcc {driver}"
        )
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the GPU's compute capability is {major}.{minor}, and 8.0 is the least"
    return ""


def count() -> int:
    """GPUs that torch sees."""
    return torch.cuda.device_count()


def _layer(spec: KVSpec, prompts: PromptAttention | None) -> _Layer:
    stored = STORED[spec.dtype]
    taken = _WIDE if stored == torch.float8_e4m3fn else (stored,)
    return _Layer(spec, stored, taken, prompts is not None and prompts.serves(spec))


def _add_layer(native: _native.CudaAttentionPool, spec: KVSpec, num_heads: int) -> None:
    native.add_layer(
        dtype=_CODES[STORED[spec.dtype]],
        kv_heads=spec.kv_heads,
        group=num_heads // spec.kv_heads,
        k_dim=spec.k_dim,
        v_dim=spec.v_dim,
        scale=spec.scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
        k_scale=spec.k_scale,
        v_scale=spec.v_scale,
        sinks=list(spec.sinks or ()),
        alibi_slopes=list(spec.alibi_slopes or ()),
    )
