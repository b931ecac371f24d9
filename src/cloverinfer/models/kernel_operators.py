"""Operators that rewritten graphs call: the kernels of native halves, wherever they run.

Importing this module registers them. On a device without such kernels PyTorch computes the same. It
knows nothing of graphs.

Shapes: t tokens, i inputs, o outputs, h query heads, n KV heads, d head size.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from ..attention.base import FusedRows
from .base import QKV
from .cuda_kernels import DenseKernels, cuda_serves
from .linear import make_linear
from .panels import multiply, multiply_experts


@functools.cache
def _kernels_of(dtype: torch.dtype, device: torch.device) -> DenseKernels | None:
    return DenseKernels(dtype, device) if cuda_serves(dtype, device) else None


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    outputs: int,
    gated: bool,
) -> torch.Tensor:
    """``[..., o]`` of ``x`` ``[..., i]``: the product, plus what is to be added, or gated."""
    x_ti = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, outputs)
    if weight.dtype == torch.uint8:
        y_to = multiply(x_ti, weight, bias, added, (outputs, 2 if gated else 1))
    else:
        linear = make_linear(weight, bias, packed=False)
        kernels = _kernels_of(x.dtype, x.device)
        if gated and kernels is not None and not linear.fuses_gate(len(x_ti)):
            y_to = kernels.gate(linear(x_ti))
        elif gated:
            y_to = linear.gated(x_ti)
        else:
            y_to = linear(x_ti) if added is None else linear.add(x_ti, added)
    return y_to.reshape(*x.shape[:-1], outputs)


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    outputs: int,
    gated: bool,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, rounded once."""
    kernels = _kernels_of(x.dtype, x.device)
    if kernels is None:
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)
    x_tc = x.reshape(-1, x.shape[-1])
    return kernels.norm(_plain(x_tc), _plain(weight), eps).view(x.shape)


def _norm_fake(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x.new_empty(x.shape)


def linear_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product plus ``residual``, and its norm with the weight ``scale``: each ``[..., o]``."""
    outputs = len(scale)
    kernels = _kernels_of(x.dtype, x.device)
    if kernels is not None:
        x_ti = x.reshape(-1, x.shape[-1])
        linear = make_linear(weight, bias, packed=False)
        if not linear.fuses_add(len(x_ti)):
            added = _plain(residual.reshape(-1, outputs))
            sum_to, norm_to = kernels.add_norm(added, linear(x_ti), _plain(scale), eps)
            shape = (*x.shape[:-1], outputs)
            return sum_to.view(shape), norm_to.view(shape)
    total = product(x, weight, bias, residual, outputs, False)
    return total, norm(total, scale, eps)


def _linear_norm_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    scale: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (*x.shape[:-1], len(scale))
    return x.new_empty(shape), x.new_empty(shape)


def turn(rows: FusedRows, parts: QKV) -> None:
    """Rotates queries and keys of ``rows``, which have no norm, and puts all to ``parts``: views of
    them, or elsewhere."""
    assert rows.norm_hd is None
    kernels = _kernels_of(rows.qkv_thd.dtype, rows.qkv_thd.device)
    if kernels is not None:
        kernels.rotate(rows.qkv_thd, parts, rows.positions_t, rows.rope)
        return
    half = rows.qkv_thd.shape[2] // 2
    cos, sin = (table[rows.positions_t, :, half:].float() for table in rows.rope)
    for value, part in zip(rows.parts, parts, strict=True):
        one, other = value[..., :half].float(), value[..., half:].float()
        if part is parts[2]:
            part.copy_(value)
        else:
            part.copy_(torch.cat((one * cos - other * sin, other * cos + one * sin), -1))


def _plain(x: torch.Tensor) -> torch.Tensor:
    """With the elements of a row one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _expert_panels(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    outputs: int,
) -> torch.Tensor:
    return multiply_experts(x, panels, bias, experts, outputs)


def _expert_panels_fake(
    x: torch.Tensor,
    panels: torch.Tensor,
    bias: torch.Tensor | None,
    experts: torch.Tensor,
    outputs: int,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], outputs))


_LIBRARY = torch.library.Library("cloverinfer", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int outputs, bool gated)"
    " -> Tensor"
)
_LIBRARY.impl("linear", product, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::linear", _linear_fake, lib=_LIBRARY)
_LIBRARY.define(
    "expert_panels(Tensor x, Tensor panels, Tensor? bias, Tensor experts, int outputs) -> Tensor"
)
_LIBRARY.impl("expert_panels", _expert_panels, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::expert_panels", _expert_panels_fake, lib=_LIBRARY)
_LIBRARY.define("norm(Tensor x, Tensor weight, float eps) -> Tensor")
_LIBRARY.impl("norm", norm, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::norm", _norm_fake, lib=_LIBRARY)
_LIBRARY.define(
    "linear_norm(Tensor x, Tensor weight, Tensor? bias, Tensor residual, Tensor scale, float eps)"
    " -> (Tensor, Tensor)"
)
_LIBRARY.impl("linear_norm", linear_norm, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::linear_norm", _linear_norm_fake, lib=_LIBRARY)
DIRECT = {
    torch.ops.cloverinfer.linear.default: product,
    torch.ops.cloverinfer.linear_norm.default: linear_norm,
    torch.ops.cloverinfer.norm.default: norm,
}
"""What to call instead where PyTorch's dispatcher, which costs as much as a small product, is not
needed."""
