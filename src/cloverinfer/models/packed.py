"""Matrices as ``csrc/dense_cpu`` reads them: the order of ``kernel.h``, and quantisation.

It owns how a plain or a quantised matrix becomes panels. It does not know what a matrix is for, nor
how files store theirs.

Shapes: o outputs, i inputs, g groups of ``GROUP`` inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from .. import _native
from .linear import Linear

GROUP = 32
"""Inputs that share a scale."""


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
    """int8 for ``INT8``, uint8 from 0 to 15 for ``INT4``; i a multiple of 32."""
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
    outputs, inputs = linear.shape
    size = outputs // folds, inputs, folds
    if isinstance(linear, QuantizedLinear):
        _pack_codes(linear.codes, size, how.threads, to_b)
        return
    assert linear.weight.dtype == torch.bfloat16
    weight = linear.weight.contiguous()
    _native.dense_pack(
        threads=how.threads,
        format=format_of(linear, how.int8),
        weight=weight.data_ptr(),
        size=size,
        to=to_b.data_ptr(),
    )


def _pack_codes(codes: Codes, size: tuple[int, int, int], threads: int, to_b: torch.Tensor) -> None:
    parts = (codes.codes_oi, codes.scales_og, codes.minima_og)
    stored = [None if part is None else part.contiguous() for part in parts]
    at_codes, at_scales, at_minima = (0 if part is None else part.data_ptr() for part in stored)
    _native.dense_pack_codes(
        threads=threads,
        format=codes.format,
        codes=(at_codes, at_scales, at_minima),
        size=size,
        to=to_b.data_ptr(),
    )
