"""Products with weights on a CPU by ``csrc/dense_cpu``, one at a time: for graphs, which have other
code between their products. The native stages use the same kernels without Python.

Shapes: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

import functools

import torch

from .. import _native
from .arena import Arena
from .linear import Linear
from .native import native_serves
from .packed import Format, Packing, pack, packed_bytes
from .threads import kernel_threads


def panels_serve(weight: torch.Tensor) -> bool:
    """Whether a matrix ``[o, i]`` can be multiplied with as panels here."""
    return native_serves(weight.dtype, weight.device) and weight.shape[1] % 2 == 0


def panels_of(weight_oi: torch.Tensor, folds: int) -> torch.Tensor:
    """The matrix as uint8 ``[bytes]``, which does not keep it. ``folds``: 2 for ``gated``."""
    how, linear = Packing(torch.get_num_threads()), Linear(weight_oi)
    nbytes = packed_bytes(linear, folds, how)
    panels = Arena(nbytes, 1).room(nbytes)
    pack(linear, folds, how, panels)
    return panels


def multiply(
    x_ti: torch.Tensor,
    panels: torch.Tensor,
    bias_o: torch.Tensor | None,
    residual_to: torch.Tensor | None,
    size: tuple[int, int],
) -> torch.Tensor:
    """bfloat16: the product plus bias and residual; with two folds ``silu(first) * second``, with
    no residual. ``size``: outputs of a fold, folds."""
    (tokens, inputs), (outputs, folds) = x_ti.shape, size
    assert x_ti.dtype == torch.bfloat16
    y_to = x_ti.new_empty((tokens, outputs))
    if not tokens:
        return y_to
    x_ti = x_ti if x_ti.stride(1) == 1 else x_ti.contiguous()
    residual_to = None if residual_to is None else residual_to.contiguous()
    _products(kernel_threads()).multiply(
        (Format.BFLOAT16.value, panels.data_ptr(), 0 if bias_o is None else bias_o.data_ptr()),
        (outputs, inputs, folds),
        x_ti.data_ptr(),
        (tokens, max(x_ti.stride(0), inputs)),
        0 if residual_to is None else residual_to.data_ptr(),
        y_to.data_ptr(),
    )
    return y_to


@functools.cache
def _products(threads: int) -> _native.CpuProducts:
    return _native.CpuProducts(threads=threads, isa="auto")
