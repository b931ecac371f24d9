"""Operators that graphs of compiled models call: what PyTorch has no operator for.

Importing this module registers them, which loading such a graph needs.

Shapes: s rows (a token and one of its experts), e experts, i inputs, o outputs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


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
    for expert in torch.unique(experts_s).tolist():
        rows = (experts_s == expert).nonzero().flatten()
        matrix_oi = weight[expert].T if transposed else weight[expert]
        bias_o = None if bias_eo is None else bias_eo[expert]
        out_so[rows] = torch.nn.functional.linear(x_si[rows], matrix_oi, bias_o)
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
