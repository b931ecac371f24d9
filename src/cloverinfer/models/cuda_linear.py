"""Products with weights on a GPU: our kernel where it measured best, else PyTorch's.

Decode multiplies few tokens with every weight, and is bound by reading them. ``csrc/dense_cuda``
has a kernel for that: bfloat16 rows, weights in bfloat16 or in float8 (e4m3) with a scale for each
output, compute capability 9.0, any sizes that are multiples of 8 (16 of float8). It can take the
residual's addition or the gate of a gated FFN along, and it starts to read its weights while the
kernel before it ends. Beyond ``OWN_ROWS`` tokens, and for what the kernel does not serve, the
product that it was made of is used.

``batch_invariant``: a token's result has the same bits whatever is computed beside it. The kernel
then serves calls of any size, so many tokens at a time, and reads the weights again for each.
"""

from __future__ import annotations

import functools

import torch

from .. import _native
from .product import Linear

OWN_ROWS = 64
"""Tokens up to which our kernel is used."""
_MANY = 2**62
_ALIGNMENT = 16
"""Bytes on which matrices and their rows lie, as the copy engine wants it."""


@functools.lru_cache
def gemm_of(device: int) -> _native.CudaGemm | None:
    """The kernels on a device, where this build has them and the device can run them."""
    if not _native.CUDA_BUILT or not _native.cuda_gemm_serves(device):
        return None
    return _native.CudaGemm(device=device)


def gemm_serves(weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply with ``weight`` ``[out, in]``."""
    if weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    outputs, inputs = weight.shape
    fits = outputs % 8 == 0 and inputs % 8 == 0 and weight.is_contiguous()
    return fits and _aligned(weight) and gemm_of(weight.get_device()) is not None


class CudaLinear(Linear):
    """``x @ weight.T + bias`` of rows ``[t, in]`` on a GPU. Calls can be captured, on streams that
    one call was made on before.
    """

    def __init__(self, plain: Linear, batch_invariant: bool = False) -> None:
        """``plain``: the same product, for what the kernel does not serve."""
        super().__init__(plain.weight, plain.bias)
        self.nbytes = plain.nbytes
        self.scale_o = plain.scale_o
        gemm = gemm_of(plain.weight.get_device())
        assert gemm is not None
        self._plain = plain
        self._gemm = gemm
        self._rows = _MANY if batch_invariant else OWN_ROWS
        self._gates = plain.weight.shape[0] % 16 == 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x) if self._own(x) else self._plain(x)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        if not self._own(x) or residual.stride(1) != 1 or residual.stride(0) % 2:
            return self._plain.add(x, residual)
        return self._multiply(x, residual)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        if not self._gates or not self._own(x):
            return self._plain.gated(x)
        return self._multiply(x, gated=True)

    def fuses_add(self, rows: int) -> bool:
        return rows <= self._rows

    def fuses_gate(self, rows: int) -> bool:
        return self._gates and rows <= self._rows

    def _own(self, x: torch.Tensor) -> bool:
        fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and _aligned(x)
        return fits and 0 < x.shape[0] <= self._rows

    def _multiply(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        y = x.new_empty((x.shape[0], self.weight.shape[0] // (2 if gated else 1)))
        stream = torch.cuda.current_stream(x.device).cuda_stream
        workspace = _workspace(x.get_device(), stream)
        scales = 0 if self.scale_o is None else self.scale_o.data_ptr()
        for at in range(0, x.shape[0], _native.GEMM_TOKENS):
            rows = slice(at, at + _native.GEMM_TOKENS)
            self._gemm.multiply(
                stream,
                workspace.data_ptr(),
                y[rows].shape[0],
                (self.weight.data_ptr(), *self.weight.shape, gated, scales),
                0 if self.bias is None else self.bias.data_ptr(),
                _rows(x[rows]),
                _rows(y[rows]),
                None if residual is None else _rows(residual[rows]),
            )
        return y


@functools.cache
def _workspace(device: int, stream: int) -> torch.Tensor:
    """What launches on one stream share; zero where it is made, as the kernel leaves it."""
    assert not torch.cuda.is_current_stream_capturing(), "call once before capturing"
    gemm = gemm_of(device)
    assert gemm is not None
    return torch.zeros(gemm.workspace_bytes, dtype=torch.uint8, device=f"cuda:{device}")


def _rows(x: torch.Tensor) -> tuple[int, int]:
    """Address, and elements from row to row."""
    return x.data_ptr(), x.stride(0)


def _aligned(x: torch.Tensor) -> bool:
    return x.data_ptr() % _ALIGNMENT == 0
