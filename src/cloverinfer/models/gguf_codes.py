"""A GGUF file's quantised matrices as they are stored, without a way through other types.

Those of Q4_0, Q4_1 and Q8_0, whose blocks ``csrc/dense_cpu/blocks.h`` knows; matrices of other
types are read as plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .. import _native
from .gguf_file import GGUFFile
from .linear import Linear
from .packed import GROUP, Codes, Format, QuantizedLinear
from .weights import Checkpoint, Shape

_KINDS = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}
"""As ``csrc/dense_cpu/blocks.h`` numbers them."""
_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def read_codes(file: GGUFFile, *names: str) -> Codes | None:
    """The matrices ``names`` (Hugging Face's) of ``file``, one below the other; None where one is
    of another type, or where they are not of one format."""
    stored = [part for name in names if (part := file.stored(name)) is not None]
    if len(stored) < len(names) or any(kind not in _KINDS for kind, _ in stored):
        return None
    formats = {Format.INT8 if kind == "Q8_0" else Format.INT4 for kind, _ in stored}
    if len(formats) > 1:
        return None
    kind, rows = stored[0]
    groups = rows.shape[1] // _BLOCK_BYTES[kind]
    codes = _empty(formats.pop(), sum(rows.shape[0] for _, rows in stored), groups)
    at = 0
    for kind, rows in stored:
        _read(kind, rows, codes, at)
        at += rows.shape[0]
    return codes


def _empty(format: Format, outputs: int, groups: int) -> Codes:
    scales_og = torch.empty((outputs, groups), dtype=torch.float16)
    int4 = format is Format.INT4
    codes_oi = torch.empty((outputs, groups * GROUP), dtype=torch.uint8 if int4 else torch.int8)
    return Codes(format, codes_oi, scales_og, torch.empty_like(scales_og) if int4 else None)


def _read(kind: str, rows: npt.NDArray[np.uint8], codes: Codes, at: int) -> None:
    """``rows`` as ``codes`` from output ``at`` on."""
    minima = 0 if codes.minima_og is None else codes.minima_og[at:].data_ptr()
    _native.dense_read_blocks(
        threads=torch.get_num_threads(),
        kind=_KINDS[kind],
        blocks=rows.ctypes.data,
        count=rows.shape[0] * codes.scales_og.shape[1],
        to=(codes.codes_oi[at:].data_ptr(), codes.scales_og[at:].data_ptr(), minima),
    )


class GGUFCheckpoint(Checkpoint):
    """A GGUF file whose products keep the codes that they are stored in."""

    def __init__(self, file: GGUFFile, dtype: torch.dtype) -> None:
        super().__init__(file, dtype)
        self._file = file

    def linear(
        self, parts: Sequence[tuple[str, int]], inputs: int, bias: bool, packed: bool = True
    ) -> Linear:
        codes = self._codes([(name + ".weight", (outputs, inputs)) for name, outputs in parts])
        if codes is None:
            return super().linear(parts, inputs, bias, packed)
        return QuantizedLinear(codes, self._biases(parts) if bias else None)

    def product(self, name: str, weight: torch.Tensor, packed: bool = True) -> Linear:
        codes = self._codes([(name, (weight.shape[0], weight.shape[1]))])
        return super().product(name, weight, packed) if codes is None else QuantizedLinear(codes)

    def _codes(self, parts: list[tuple[str, Shape]]) -> Codes | None:
        """None also where the file has no such matrix: reading it plainly says so."""
        file = self._file
        if any(not file.has(name) or file.shape(name) != shape for name, shape in parts):
            return None
        return read_codes(file, *(name for name, _ in parts))
