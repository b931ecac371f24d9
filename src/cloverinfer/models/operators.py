"""Operators that graphs of compiled models call: what PyTorch has no operator for.

Importing this module registers them, which loading such a graph needs.

Shapes: s rows (a token and one of its experts), e experts, i inputs, o outputs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch

_COPIES = 3
"""A copied matrix is read, written and read."""


def _expert_linear(
    x_si: torch.Tensor,
    weight: torch.Tensor,
    bias_eo: torch.Tensor | None,
    experts_s: torch.Tensor,
    transposed: bool,
) -> torch.Tensor:
    """Each row through its own expert: ``[s, o]``. Rows of one expert are one product, so that
    weights are read once and nothing is gathered."""
    outputs = weight.shape[2 if transposed else 1]
    out_so = x_si.new_zeros((x_si.shape[0], outputs))
    weight_eoi = weight.transpose(1, 2) if transposed else weight
    if x_si.is_cuda and torch.cuda.is_current_stream_capturing():
        return _captured(x_si, weight_eoi, bias_eo, experts_s, out_so)
    for expert in torch.unique(experts_s).tolist():
        rows = (experts_s == expert).nonzero().flatten()
        bias_o = None if bias_eo is None else bias_eo[expert]
        out_so[rows] = torch.nn.functional.linear(x_si[rows], weight_eoi[expert], bias_o)
    return out_so


def _captured(
    x_si: torch.Tensor,
    weight_eoi: torch.Tensor,
    bias_eo: torch.Tensor | None,
    experts_s: torch.Tensor,
    out_so: torch.Tensor,
) -> torch.Tensor:
    """The same without knowing on the host which experts were chosen: their matrices are copied
    where rows are few, else every row goes through every expert."""
    if _COPIES * len(x_si) <= len(weight_eoi):
        out_so = torch.bmm(weight_eoi[experts_s], x_si[:, :, None])[:, :, 0]
        return out_so if bias_eo is None else out_so + bias_eo[experts_s]
    for expert, matrix_oi in enumerate(weight_eoi):
        bias_o = None if bias_eo is None else bias_eo[expert]
        product_so = torch.nn.functional.linear(x_si, matrix_oi, bias_o)
        out_so = torch.where((experts_s == expert)[:, None], product_so, out_so)
    return out_so


def _expert_linear_fake(
    x_si: torch.Tensor,
    weight: torch.Tensor,
    bias_eo: torch.Tensor | None,
    experts_s: torch.Tensor,
    transposed: bool,
) -> torch.Tensor:
    return x_si.new_empty((x_si.shape[0], weight.shape[2 if transposed else 1]))


expert_linear = torch.library.custom_op(
    "cloverinfer::expert_linear",
    _expert_linear,
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor? bias, Tensor experts, bool transposed) -> Tensor",
)
expert_linear.register_fake(_expert_linear_fake)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """While ``torch.export`` works: keeps back what it warns of its own insides."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.")
        yield
