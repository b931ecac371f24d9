"""Matrix products over weights in float8 (e4m3), for GPUs.

Weights have a scale for each output, made as they are loaded. Few rows of bfloat16 are multiplied
with them by our kernel, where the device runs it (``cuda_linear.py``), as they are. Else the rows
are quantised as they come, with a scale for each row, so nothing is calibrated: on a GPU products
are ``torch._scaled_mm``'s then, summed in float32 and rounded to the rows' type. On a CPU the same
is computed from widened numbers: right but slow, for reference. What it costs in accuracy:
``benchmarks/quantization_error.py``.

Shapes: t tokens, o outputs, c inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from ..core.errors import ModelError
from .cuda_kernels import DenseKernels, cuda_serves
from .cuda_linear import CudaLinear, gemm_serves
from .product import Linear

LARGEST = 448.0
"""Of e4m3."""
_MULTIPLE = 16
"""That inputs and outputs must be of for ``torch._scaled_mm``."""
_CAPABILITY = (8, 9)


class Fp8Linear(Linear):
    """``x @ weight.T + bias`` of bfloat16 rows; the plain weight is not kept. Where our kernel can
    multiply with it, it lies interleaved."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self._kernels: DenseKernels | None = None
        if weight.device.type == "cuda":
            self._kernels = DenseKernels(weight.dtype, weight.device)
        self.interleaved = gemm_serves(weight)
        self.weight, scale_o1 = quantise(weight)
        if self.interleaved:
            self.weight = interleave(self.weight)
        self._scale_1o = scale_o1.T.contiguous()
        self.scale_o = self._scale_1o[0]
        self.nbytes += self.weight.nbytes + scale_o1.nbytes - weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._kernels is None:
            return self._reference(x)
        if not x.shape[0]:
            return x.new_empty((0, self.shape[0]))
        quantised_tc, scale_t1 = self._kernels.quantise(x, self.interleaved)
        return torch._scaled_mm(
            quantised_tc,
            self.weight.T,
            scale_a=scale_t1,
            scale_b=self._scale_1o,
            bias=self.bias,
            out_dtype=x.dtype,
        )

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + self(x)

    def _reference(self, x: torch.Tensor) -> torch.Tensor:
        quantised_tc, scale_t1 = quantise(x)
        sums_to = F.linear(quantised_tc.float(), self.weight.float()) * scale_t1 * self._scale_1o
        return (sums_to if self.bias is None else sums_to + self.bias).to(x.dtype)


def make_fp8_linear(
    weight: torch.Tensor, bias: torch.Tensor | None = None, batch_invariant: bool = False
) -> Linear:
    """A product with ``weight``, which ``fp8_fits``, in float8: few rows by our kernel where the
    device runs it, rows of any number where ``batch_invariant``."""
    product = Fp8Linear(weight, bias)
    return CudaLinear(product, batch_invariant) if product.interleaved else product


def interleave(x_tc: torch.Tensor) -> torch.Tensor:
    """The columns in the order that our kernel reads float8 in: of every 16, i, i + 8, i + 1, i + 9
    of i = 0, 2, 4, 6 in turn."""
    x_tghij = x_tc.view(x_tc.shape[0], -1, 2, 4, 2)
    return x_tghij.permute(0, 1, 3, 4, 2).reshape(x_tc.shape)


def quantise(x_tc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x_tc`` as float8_e4m3, and what each row is to be multiplied by again: float32 ``[t, 1]``.
    The row's largest becomes the type's."""
    largest_t1 = x_tc.abs().amax(1, keepdim=True).float()
    scale_t1 = (largest_t1 / LARGEST).where(largest_t1 != 0, 1.0)
    scaled_tc = (x_tc.float() * (1 / scale_t1)).clamp_(-LARGEST, LARGEST)
    return scaled_tc.to(torch.float8_e4m3fn), scale_t1


def fp8_fits(outputs: int, inputs: int) -> bool:
    """Whether a matrix of this size can be in float8; others stay in the model's type."""
    return outputs % _MULTIPLE == 0 and inputs % _MULTIPLE == 0


def check_fp8(dtype: torch.dtype, device: torch.device) -> None:
    """``ModelError`` where weights on ``device`` cannot be in float8."""
    if device.type == "cpu":
        return
    if not cuda_serves(dtype, device) or torch.cuda.get_device_capability(device) < _CAPABILITY:
        raise ModelError(
            f"model.quantization fp8 cannot be used on {device}: it needs compute capability 8.9 "
            "or newer, and a build with CUDA kernels: leave it out"
        )
