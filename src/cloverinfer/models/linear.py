"""Matrix products with weights, in the layout that measures best for few rows.

bfloat16 weights are packed once for oneDNN's blocked kernels, which also fuse the residual's
addition. Measured over all of a model's products in turn, so that weights come from memory and not
from a cache: the gain over ``F.linear`` is small at one row, where reading the weights is the cost,
and larger at 16. (One matrix used over and over stays in the cache and shows far more.) Whether
packing works here is tried once, on a small product. float32 stays with ``F.linear``, whose kernels
transformers uses, so that its logits can be the same to the bit.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from .cuda_linear import CudaLinear, gemm_serves
from .product import Linear

__all__ = ["Linear", "PackedLinear", "make_linear", "packing_works"]

PACKED_DTYPES = (torch.bfloat16,)
"""Types whose weights are packed where the CPU and this build of PyTorch can."""
_ROWS_HINT = 16
"""Rows that packing is told to expect; in bfloat16 no other value measured better."""


class PackedLinear(Linear):
    """The same with the weight in oneDNN's blocked layout; the plain weight is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._product_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._product(x, self.weight, self.bias, "none", [], "")

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._product_add(x, residual, self.weight, self.bias, "add")


def make_linear(
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    packed: bool = True,
    batch_invariant: bool = False,
) -> Linear:
    """A product with ``weight``: packed where that is asked for and known to work for its type, by
    our kernel where the device runs it."""
    if packed and weight.device.type == "cpu" and packing_works(weight.dtype):
        return PackedLinear(weight, bias)
    if gemm_serves(weight):
        return CudaLinear(Linear(weight, bias), batch_invariant)
    return Linear(weight, bias)


@functools.lru_cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether packed products exist here, run on this CPU and agree with ``F.linear``."""
    if dtype not in PACKED_DTYPES or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((48, 64), generator=generator).to(dtype)
    x, residual = (
        torch.randn((3, 64), generator=generator).to(dtype),
        torch.ones((3, 48), dtype=dtype),
    )
    bias = torch.randn(48, generator=generator).to(dtype)
    try:
        with torch.inference_mode():
            packed = PackedLinear(weight, bias)
            pairs = [(packed(x), F.linear(x, weight, bias))]
            pairs.append((packed.add(x, residual), residual + pairs[0][1]))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False  # an older PyTorch, another build, or a CPU without the instructions
    return all(torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.2) for a, b in pairs)
