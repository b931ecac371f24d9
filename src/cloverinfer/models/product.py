"""A matrix product with weights, and what can be fused with it: the plain way, by PyTorch.

``linear.py`` chooses among this and the classes that do better; halves know this one alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name


class Linear:
    """``x @ weight.T + bias``; ``weight`` ``[out, in]``, rows of ``x`` ``[t, in]``."""

    scale_o: torch.Tensor | None = None
    """What each output's weights are to be multiplied by; None: nothing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.shape = tuple(weight.shape)
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual`` plus the product."""
        return residual + F.linear(x, self.weight, self.bias)

    def fuses_add(self, rows: int) -> bool:
        """Whether ``add`` of so many rows costs no more than the product alone."""
        return False

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of a product whose outputs are gate and then up."""
        gate, up = self(x).chunk(2, -1)
        return F.silu(gate).mul_(up)

    def fuses_gate(self, rows: int) -> bool:
        """Whether ``gated`` of so many rows costs no more than the product alone."""
        return False
