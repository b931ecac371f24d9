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


def quantize_int8(weight_oi: torch.Tensor) -> Codes:
    """The nearest of 255 multiples of a scale, which makes the group's largest weight 127.

    Inputs are filled up with zeros to whole groups.
    """
    weight = F.pad(weight_oi.float(), (0, -weight_oi.shape[1] % GROUP))
    grouped = weight.view(weight.shape[0], -1, GROUP)
    scales = (grouped.abs().amax(-1) / 127).half()
    factor = torch.where(scales > 0, 1 / scales.float(), 0.0)
    codes = grouped.mul(factor[..., None]).round_().clamp_(-127, 127).char()
    return Codes(Format.INT8, codes.flatten(1), scales, None)


def format_of(linear: Linear, int8: bool) -> Format:
    """What ``pack`` makes of a product's weight; ``int8``: quantise one that is not yet."""
    if isinstance(linear, QuantizedLinear):
        return linear.codes.format
    return Format.INT8 if int8 else Format.BFLOAT16


def pack(linear: Linear, folds: int, int8: bool) -> torch.Tensor:
    """The panels ``[panels, bytes]`` (uint8) of a product's weight.

    ``folds``: parts of equal size, one below the other, whose panels are to alternate.
    """
    if format_of(linear, int8) is Format.BFLOAT16:
        return _alternating([_pack_plain(part) for part in linear.weight.chunk(folds)])
    codes = linear.codes if isinstance(linear, QuantizedLinear) else quantize_int8(linear.weight)
    rows = codes.codes_oi.shape[0] // folds
    parts = [_rows(codes, at, at + rows) for at in range(0, folds * rows, rows)]
    return _alternating([_pack_codes(part) for part in parts])


def _alternating(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts, 1).flatten(0, 1)


def _rows(codes: Codes, start: int, stop: int) -> Codes:
    minima = codes.minima_og
    return Codes(
        codes.format,
        codes.codes_oi[start:stop],
        codes.scales_og[start:stop],
        None if minima is None else minima[start:stop],
    )


def _whole_panels(rows: torch.Tensor, columns: int = 1) -> torch.Tensor:
    """With zeros up to multiples of ``BLOCK`` rows and ``columns`` columns."""
    more = (0, -rows.shape[1] % columns, 0, -rows.shape[0] % BLOCK)
    return F.pad(rows, more) if any(more) else rows.contiguous()


def _pack_plain(weight_oi: torch.Tensor) -> torch.Tensor:
    assert weight_oi.dtype == torch.bfloat16
    whole = _whole_panels(weight_oi, 2)
    pairs = whole.view(torch.int32).view(-1, BLOCK, whole.shape[1] // 2)
    return pairs.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _pack_codes(codes: Codes) -> torch.Tensor:
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
