"""A GGUF file's quantised matrices as they are stored, without a way through other types.

Those of Q4_0, Q4_1 and Q8_0, whose blocks ``csrc/dense_cpu/blocks.h`` knows; matrices of other
types are read as plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _native
from .gguf_file import GGUFFile
from .linear import Linear
from .packed import GROUP, Codes, Format, QuantizedLinear
from .weights import Checkpoint

_KINDS = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
"""As ``csrc/dense_cpu/blocks.h`` numbers them."""
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def read_codes(file: GGUFFile, name: str) -> Codes | None:
    """The matrix ``name`` (Hugging Face's) of ``file``; None where it is of another type."""
    stored = file.stored(name)
    if stored is None or stored[0] not in _KINDS:
        return None
    kind, rows = stored
    shape = rows.shape[0], rows.shape[1] // _BLOCK_BYTES[kind]
    has_minima = kind != "Q8_0"
    scales_og = torch.empty(shape, dtype=torch.float16)
    minima_og = torch.empty_like(scales_og) if has_minima else None
    codes = torch.uint8 if has_minima else torch.int8
    codes_oi = torch.empty((shape[0], shape[1] * GROUP), dtype=codes)
    minima = 0 if minima_og is None else minima_og.data_ptr()
    _native.dense_read_blocks(
        threads=torch.get_num_threads(),
        kind=_KINDS[kind],
        blocks=rows.ctypes.data,
        count=scales_og.numel(),
        to=(codes_oi.data_ptr(), scales_og.data_ptr(), minima),
    )
    return Codes(Format.INT4 if has_minima else Format.INT8, codes_oi, scales_og, minima_og)


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
