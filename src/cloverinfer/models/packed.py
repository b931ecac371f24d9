"""Matrices as ``csrc/dense_cpu`` reads them: the order of ``kernel.h``, and quantisation.

It owns how a plain or a quantised matrix becomes panels. It does not know what a matrix is for, nor
how files store theirs.

Shapes: o outputs, i inputs, g groups of ``GROUP`` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from .. import _native
from .linear import Linear

BLOCK = 16
"""Outputs of a panel."""
GROUP = 32
"""Inputs that share a scale."""
_QUAD = 4
"""Inputs whose codes lie together."""


class Format(IntEnum):
    """As ``kernel.h`` numbers them."""

    BFLOAT16 = 0
    INT8 = 1
    INT4 = 2


@dataclass
class Codes:
    """A quantised matrix: weight ``[o, i]`` is scale times code, plus the minimum."""

    format: Format
    codes_oi: torch.Tensor
    """int8 from -127 to 127 for ``INT8``, uint8 from 0 to 15 for ``INT4``; i a multiple of 32."""
    scales_og: torch.Tensor
    """float16."""
    minima_og: torch.Tensor | None
    """float16, for ``INT4``; None for ``INT8``."""

    def dequantized(self) -> torch.Tensor:
        """``[o, i]`` in float64, exactly."""
        weight = self.codes_oi.double() * self.scales_og.double().repeat_interleave(GROUP, 1)
        if self.minima_og is not None:
            weight += self.minima_og.double().repeat_interleave(GROUP, 1)
        return weight

    @classmethod
    def stacked(cls, parts: list[Codes]) -> Codes:
        """Matrices of one format, one below the other."""
        minima = [part.minima_og for part in parts if part.minima_og is not None]
        return cls(
            parts[0].format,
            torch.cat([part.codes_oi for part in parts]),
            torch.cat([part.scales_og for part in parts]),
            torch.cat(minima) if minima else None,
        )


class QuantizedLinear(Linear):
    """A product whose weight is quantised; ``weight`` is not kept."""

    def __init__(self, codes: Codes, bias: torch.Tensor | None = None) -> None:
        super().__init__(torch.empty(0), bias)
        self.codes = codes
        self.shape = (codes.codes_oi.shape[0], codes.codes_oi.shape[1])


def format_of(linear: Linear, int8: bool) -> Format:
    """What ``pack`` makes of a product's weight; ``int8``: quantise one that is not yet."""
    if isinstance(linear, QuantizedLinear):
        return linear.codes.format
    return Format.INT8 if int8 else Format.BFLOAT16


@dataclass(frozen=True)
class Packing:
    """How a half's matrices are packed."""

    threads: int
    int8: bool = False
    """Whether to quantise what is not yet."""


def packed_bytes(linear: Linear, folds: int, how: Packing) -> int:
    """Size of ``pack``'s panels."""
    outputs, inputs = linear.shape
    format = format_of(linear, how.int8)
    return folds * _native.dense_packed_bytes(format, outputs // folds, inputs)


def pack(linear: Linear, folds: int, how: Packing, to_b: torch.Tensor) -> None:
    """Writes the panels of a product's weight to ``to_b`` (uint8, ``packed_bytes``).

    ``folds``: parts of equal size, one below the other, whose panels are to alternate.
    """
    if isinstance(linear, QuantizedLinear):
        rows = linear.shape[0] // folds
        parts = [_rows(linear.codes, at, at + rows) for at in range(0, folds * rows, rows)]
        panels = torch.stack([pack_codes(part) for part in parts], 1)
        to_b.copy_(panels.flatten())
        return
    assert linear.weight.dtype == torch.bfloat16
    weight = linear.weight.contiguous()
    outputs, inputs = linear.shape
    _native.dense_pack(
        threads=how.threads,
        format=format_of(linear, how.int8),
        weight=weight.data_ptr(),
        size=(outputs // folds, inputs, folds),
        to=to_b.data_ptr(),
    )


def _rows(codes: Codes, start: int, stop: int) -> Codes:
    minima = codes.minima_og
    return Codes(
        codes.format,
        codes.codes_oi[start:stop],
        codes.scales_og[start:stop],
        None if minima is None else minima[start:stop],
    )


def _whole_panels(rows: torch.Tensor) -> torch.Tensor:
    """With zeros up to a multiple of ``BLOCK`` rows."""
    more = (0, 0, 0, -rows.shape[0] % BLOCK)
    return F.pad(rows, more) if any(more) else rows.contiguous()


def pack_codes(codes: Codes) -> torch.Tensor:
    """``[panels, bytes]`` (uint8)."""
    if codes.format is Format.INT8:
        signed = codes.codes_oi
        magnitudes = signed.abs().view(torch.uint8)
        ordered = _ordered(magnitudes | (signed < 0).to(torch.uint8) * 128)
    else:
        pairs = _ordered(codes.codes_oi).view(*_panel_groups(codes), -1, 2, BLOCK * _QUAD)
        ordered = pairs[..., 0, :] | pairs[..., 1, :] << 4
    pieces = [_per_group(codes.scales_og), ordered.reshape(*_panel_groups(codes), -1)]
    if codes.minima_og is not None:
        pieces.insert(1, _per_group(codes.minima_og))
    return torch.cat(pieces, 2).flatten(1)


def _panel_groups(codes: Codes) -> tuple[int, int]:
    return -(-codes.codes_oi.shape[0] // BLOCK), codes.scales_og.shape[1]


def _ordered(codes_oi: torch.Tensor) -> torch.Tensor:
    """Codes in the order of ``kernel.h``, ``[panels, g, GROUP / 4, 4, 2, 4, 2]``."""
    whole = _whole_panels(codes_oi)
    pairs = whole.view(torch.int16).view(-1, 4, 4, whole.shape[1] // GROUP, GROUP // _QUAD, 2)
    return pairs.permute(0, 3, 4, 1, 5, 2).contiguous().view(torch.uint8)


def _per_group(values_og: torch.Tensor) -> torch.Tensor:
    """float16 ``[o, g]`` as bytes ``[panels, g, 32]``."""
    whole = _whole_panels(values_og)
    by_panel = whole.view(-1, BLOCK, whole.shape[1]).transpose(1, 2).contiguous()
    return by_panel.view(torch.uint8).view(by_panel.shape[0], by_panel.shape[1], -1)
