"""The dense half's small kernels on a GPU, on torch's tensors and its current stream.

They allocate their results, wait for nothing and read positions and ids on the device, so that all
can be captured in a CUDA graph. Arithmetic is float32, and each result is rounded once. They know
nothing of a model.

Shapes: t tokens, c hidden size, h query heads, n KV heads, d head size, f FFN size, p positions,
x vocabulary.
"""

from __future__ import annotations

import torch

from .. import _native
from .base import QKV

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""``clover::cuda::DType``: what the kernels serve."""


def cuda_serves(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build has kernels for tensors of this type there."""
    return _native.CUDA_BUILT and device.type == "cuda" and dtype in CODES


class DenseKernels:
    """Kernels on one device, for tensors of one type. Rows may have strides, elements may not."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        assert cuda_serves(dtype, device)
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._dtype, self._code = dtype, CODES[dtype]
        self._native = _native.CudaDense(device=index)

    def norm(self, x_tc: torch.Tensor, weight_c: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` of each row."""
        rows, columns = self._rows(x_tc, weight_c)
        out_tc = self._new(rows, columns)
        if rows:
            self._native.norm(
                *self._call(rows, columns, eps, weight_c),
                x_tc.data_ptr(),
                x_tc.stride(0),
                out_tc.data_ptr(),
            )
        return out_tc

    def add_norm(
        self, hidden_tc: torch.Tensor, added_tc: torch.Tensor, weight_c: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``hidden + added``, rounded as torch rounds it, and its norm."""
        rows, columns = self._rows(hidden_tc, weight_c)
        assert added_tc.shape == hidden_tc.shape
        self._check(added_tc)
        sum_tc, out_tc = self._new(rows, columns), self._new(rows, columns)
        if rows:
            self._native.add_norm(
                *self._call(rows, columns, eps, weight_c),
                hidden_tc.data_ptr(),
                hidden_tc.stride(0),
                added_tc.data_ptr(),
                added_tc.stride(0),
                sum_tc.data_ptr(),
                out_tc.data_ptr(),
            )
        return sum_tc, out_tc

    def embed_norm(
        self, table_xc: torch.Tensor, ids_t: torch.Tensor, weight_c: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the table, zeros where an id names none, and their norm."""
        vocabulary, columns = self._rows(table_xc, weight_c)
        rows = ids_t.shape[0]
        assert table_xc.is_contiguous()
        self._check_index(ids_t, rows)
        embedded_tc, out_tc = self._new(rows, columns), self._new(rows, columns)
        if rows:
            self._native.embed_norm(
                *self._call(rows, columns, eps, weight_c),
                table_xc.data_ptr(),
                vocabulary,
                ids_t.data_ptr(),
                embedded_tc.data_ptr(),
                out_tc.data_ptr(),
            )
        return embedded_tc, out_tc

    def gate(self, gate_up_t2f: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of rows that hold one after the other: ``[t, f]``."""
        self._check(gate_up_t2f)
        rows, columns = gate_up_t2f.shape[0], gate_up_t2f.shape[1] // 2
        out_tf = self._new(rows, columns)
        if rows:
            self._native.gate(
                self._stream(),
                self._code,
                rows,
                columns,
                gate_up_t2f.data_ptr(),
                gate_up_t2f.stride(0),
                out_tf.data_ptr(),
            )
        return out_tf

    def rotate(
        self,
        qkv_thd: torch.Tensor,
        parts: QKV,
        positions_t: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        norm_hd: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Queries, keys and values of ``qkv_thd`` ``[t, h + 2n, d]`` to ``parts``, which are views
        of it or elsewhere: the first two normalised where there is a norm (``[h + n, d]``), then
        rotated by ``rope``, cos and sin ``[p, 1, d]`` as ``rope_table`` makes them.
        """
        q, k, v = parts
        tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
        cos, sin = rope
        for tensor in (qkv_thd, *parts):
            self._check(tensor)
            assert tensor.stride(1) == q.shape[2]
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert norm_hd is None or norm_hd.is_contiguous()
        self._check_index(positions_t, tokens)
        if not tokens:
            return
        self._native.rotate(
            self._stream(),
            self._code,
            tokens,
            (heads, kv_heads, q.shape[2]),
            eps,
            (qkv_thd.data_ptr(), qkv_thd.stride(0)),
            positions_t.data_ptr(),
            (cos.data_ptr(), sin.data_ptr(), cos.shape[0]),
            0 if norm_hd is None else norm_hd.data_ptr(),
            (q.data_ptr(), q.stride(0)),
            (k.data_ptr(), k.stride(0)),
            (v.data_ptr(), v.stride(0)),
        )

    def quantise(
        self, x_tc: torch.Tensor, interleaved: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``x_tc`` as float8_e4m3, and what each row is to be multiplied by again: float32
        ``[t, 1]``. ``interleaved``: in the order of ``fp8.interleave``, of 16-bit rows."""
        self._check(x_tc)
        if interleaved and (x_tc.data_ptr() | x_tc.stride(0) * x_tc.itemsize) % 16:
            x_tc = x_tc.clone(memory_format=torch.contiguous_format)
        rows, columns = x_tc.shape
        out_tc = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=self._device)
        scale_t1 = torch.empty((rows, 1), device=self._device)
        if rows:
            self._native.quantise(
                self._stream(),
                self._code,
                rows,
                columns,
                x_tc.data_ptr(),
                x_tc.stride(0),
                out_tc.data_ptr(),
                scale_t1.data_ptr(),
                interleaved,
            )
        return out_tc, scale_t1

    def _new(self, rows: int, columns: int) -> torch.Tensor:
        return torch.empty((rows, columns), dtype=self._dtype, device=self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _call(
        self, rows: int, columns: int, eps: float, weight_c: torch.Tensor
    ) -> tuple[int, int, int, int, float, int]:
        """What every norm begins with."""
        return self._stream(), self._code, rows, columns, eps, weight_c.data_ptr()

    def _rows(self, x_tc: torch.Tensor, weight_c: torch.Tensor) -> tuple[int, int]:
        self._check(x_tc)
        self._check(weight_c)
        assert weight_c.shape == x_tc.shape[1:]
        return x_tc.shape[0], x_tc.shape[1]

    def _check(self, x: torch.Tensor) -> None:
        assert x.dtype == self._dtype
        assert x.device == self._device
        assert x.stride(-1) == 1

    def _check_index(self, x_t: torch.Tensor, rows: int) -> None:
        assert x_t.dtype == torch.int64
        assert x_t.device == self._device
        assert x_t.shape == (rows,)
        assert x_t.is_contiguous()
