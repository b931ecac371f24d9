"""A GGUF file's quantised matrices as they are stored, without a way through other types.

It owns the block layouts of Q4_0, Q4_1 and Q8_0. Matrices of other types are read as plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .gguf_file import GGUFFile
from .linear import Linear
from .packed import GROUP, Codes, Format, QuantizedLinear
from .weights import Checkpoint

_HALF = 2
"""Bytes of a scale or minimum."""


def read_codes(file: GGUFFile, name: str) -> Codes | None:
    """The matrix ``name`` (Hugging Face's) of ``file``; None where it is of another type."""
    stored = file.stored(name)
    if stored is None:
        return None
    kind, rows = stored
    if kind not in _READERS:
        return None
    blocks = torch.from_numpy(rows)
    sizes = {"Q4_0": _HALF + GROUP // 2, "Q4_1": 2 * _HALF + GROUP // 2, "Q8_0": _HALF + GROUP}
    return _READERS[kind](blocks.view(blocks.shape[0], -1, sizes[kind]))


def _halves(blocks_ogb: torch.Tensor, at: int) -> torch.Tensor:
    return blocks_ogb[..., at : at + _HALF].contiguous().view(torch.float16)[..., 0]


def _nibbles(blocks_ogb: torch.Tensor, at: int) -> torch.Tensor:
    """A block's first half is in the low halves of its bytes."""
    both = blocks_ogb[..., at:]
    return torch.cat((both & 0x0F, both >> 4), 2).flatten(1)


def _read_q4_0(blocks_ogb: torch.Tensor) -> Codes:
    scales = _halves(blocks_ogb, 0)
    return Codes(Format.INT4, _nibbles(blocks_ogb, _HALF), scales, scales * -8)


def _read_q4_1(blocks_ogb: torch.Tensor) -> Codes:
    minima = _halves(blocks_ogb, _HALF)
    return Codes(Format.INT4, _nibbles(blocks_ogb, 2 * _HALF), _halves(blocks_ogb, 0), minima)


def _read_q8_0(blocks_ogb: torch.Tensor) -> Codes | None:
    codes = blocks_ogb[..., _HALF:].contiguous().view(torch.int8).flatten(1)
    if bool((codes == -128).any()):
        return None  # not a sign and a magnitude of seven bits
    return Codes(Format.INT8, codes, _halves(blocks_ogb, 0), None)


_READERS = {"Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q8_0": _read_q8_0}


class GGUFCheckpoint(Checkpoint):
    """A GGUF file whose products keep the codes that they are stored in."""

    def __init__(self, file: GGUFFile, dtype: torch.dtype) -> None:
        super().__init__(file, dtype)
        self._file = file

    def linear(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, packed: bool = True
    ) -> Linear:
        found = [self._codes(name + ".weight", (outputs, inputs)) for name, outputs in parts]
        codes = [part for part in found if part is not None]
        if len(codes) < len(parts) or len({part.format for part in codes}) > 1:
            return super().linear(parts, inputs, bias, packed)
        return QuantizedLinear(Codes.stacked(codes), self._biases(parts) if bias else None)

    def product(self, name: str, weight: torch.Tensor, packed: bool = True) -> Linear:
        codes = self._codes(name, (weight.shape[0], weight.shape[1]))
        return super().product(name, weight, packed) if codes is None else QuantizedLinear(codes)

    def _codes(self, name: str, shape: tuple[int, int]) -> Codes | None:
        """None also where the file has no such matrix: reading it plainly says so."""
        if not self._file.has(name) or self._file.shape(name) != shape:
            return None
        return read_codes(self._file, name)
