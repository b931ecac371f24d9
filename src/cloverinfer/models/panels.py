"""Products with weights on a CPU by ``csrc/dense_cpu``, one at a time: for graphs, which have other
code between their products. The native stages use the same kernels without Python.

Shapes: t tokens, i inputs, o outputs; s rows (a token and one of its experts), e experts.
"""

from __future__ import annotations

import functools

import torch

from .. import _native
from .arena import Arenas
from .linear import Linear
from .native import native_serves
from .packed import Format, Packing, pack, packed_bytes
from .threads import kernel_threads

_LINE = 64
"""Bytes at a multiple of which panels begin."""


def panels_serve(weight: torch.Tensor) -> bool:
    """Whether a matrix ``[o, i]`` can be multiplied with as panels here."""
    return native_serves(weight.dtype, weight.device) and weight.shape[1] % 2 == 0


def panels_of(weight_oi: torch.Tensor, folds: int, arenas: Arenas) -> torch.Tensor:
    """The matrix as uint8 ``[bytes]`` of ``arenas``, which does not keep it. ``folds``: 2 for
    ``gated``."""
    how, linear = Packing(torch.get_num_threads()), Linear(weight_oi)
    nbytes = packed_bytes(linear, folds, how)
    panels = arenas.room(nbytes)
    pack(linear, folds, how, panels)
    return panels


def panels_of_experts(weight: torch.Tensor, transposed: bool, arenas: Arenas) -> torch.Tensor:
    """Of ``[e, o, i]``, or transposed ``[e, i, o]``: uint8 ``[e, bytes]``."""
    experts = len(weight)
    matrices = [one.T if transposed else one for one in weight]
    how = Packing(torch.get_num_threads())
    nbytes = packed_bytes(Linear(matrices[0]), 1, how)
    rooms = -(-nbytes // _LINE) * _LINE
    panels_eb = arenas.room(experts * rooms).view(experts, rooms)
    for one, room in zip(matrices, panels_eb, strict=True):
        pack(Linear(one.contiguous()), 1, how, room[:nbytes])
    return panels_eb


def multiply_experts(
    x_si: torch.Tensor,
    panels_eb: torch.Tensor,
    bias_eo: torch.Tensor | None,
    experts_s: torch.Tensor,
    outputs: int,
) -> torch.Tensor:
    """Each row through its own expert: ``[s, o]``. Rows of one expert are one product."""
    out_so = x_si.new_empty((len(x_si), outputs))
    order = torch.argsort(experts_s, stable=True)
    chosen, counts = torch.unique_consecutive(experts_s[order], return_counts=True)
    at = 0
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        rows = order[at : at + count]
        bias_o = None if bias_eo is None else bias_eo[expert].contiguous()
        out_so[rows] = multiply(x_si[rows], panels_eb[expert], bias_o, None, (outputs, 1))
        at += count
    return out_so


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
