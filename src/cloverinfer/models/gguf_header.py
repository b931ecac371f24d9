"""What a GGUF file says before its tensors' bytes: metadata, and where each tensor lies.

It walks the header once, with ``struct`` over a mapping, and decodes a value when it is asked for:
a vocabulary is most of a header, and no start but the first needs it. It does not know what keys
or tensors mean.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import quant_shape_to_byte_shape

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
"""Of tensors, where the file does not say."""
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS[12] = "d"
"""``struct``'s letters of the format's value types."""
_NUMBERS = {
    GGMLQuantizationType.F16: "<f2",
    GGMLQuantizationType.F32: "<f4",
    GGMLQuantizationType.F64: "<f8",
    GGMLQuantizationType.I8: "<i1",
    GGMLQuantizationType.I16: "<i2",
    GGMLQuantizationType.I32: "<i4",
    GGMLQuantizationType.I64: "<i8",
}
"""Types whose bytes are numbers; all others are read as bytes of blocks."""
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor's entry."""

    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """Rows first, as in PyTorch; the file has the fastest dimension first."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int


class GGUFHeader:
    """The header of the file at ``path``, which stays mapped as long as this or its data is used.

    ``ValueError`` where it is not a whole, little-endian GGUF file of version 2 or 3, ``OSError``
    where it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._values: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._walk()
        except struct.error as error:
            raise ValueError(f"the header ends early: {error}") from error

    def value(self, key: str) -> Any:
        """A metadata value: int, float, bool, str or a list of these; None where there is none."""
        if key not in self._values:
            return None
        return self._decoded(*self._values[key])

    def data(self, name: str) -> npt.NDArray[Any]:
        """A tensor's numbers, or of a quantised one the bytes of its rows; not to be written."""
        tensor = self.tensors[name]
        dtype = np.dtype(_NUMBERS.get(tensor.kind, np.uint8))
        count = tensor.nbytes // dtype.itemsize
        flat = np.frombuffer(self._bytes, dtype, count, tensor.offset)
        whole = tensor.kind in _NUMBERS
        shape = tensor.shape if whole else quant_shape_to_byte_shape(tensor.shape, tensor.kind)
        return flat.reshape(shape)

    def _walk(self) -> None:
        version, tensors, values = struct.unpack_from("<IQQ", self._bytes, 4)
        if self._bytes[:4] != _MAGIC or version not in _VERSIONS:
            raise ValueError(f"no GGUF file of version 2 or 3, little-endian: version {version}")
        at = 24
        for _ in range(values):
            key, at = self._string(at)
            (kind,) = struct.unpack_from("<I", self._bytes, at)
            if key in self._values:
                raise ValueError(f"metadata {key!r} is there twice")
            self._values[key] = kind, at + 4
            at = self._end(kind, at + 4)
        found = []
        for _ in range(tensors):
            entry, at = self._entry(at)
            found.append(entry)
        self._place(found, at)

    def _entry(self, at: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        """A tensor's name, dimensions, type and offset; and where the next entry is."""
        name, at = self._string(at)
        (dimensions,) = struct.unpack_from("<I", self._bytes, at)
        *shape, kind, offset = struct.unpack_from(f"<{dimensions}QIQ", self._bytes, at + 4)
        return (name, tuple(reversed(shape)), kind, offset), at + 16 + 8 * dimensions

    def _place(self, found: list[tuple[str, tuple[int, ...], int, int]], end: int) -> None:
        stated = self.value("general.alignment")
        alignment = _ALIGNMENT if stated is None else stated
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-end // alignment) * alignment
        for name, shape, number, offset in found:
            kind = GGMLQuantizationType(number)
            elements, nbytes = GGML_QUANT_SIZES[kind]
            size = math.prod(shape) * nbytes // elements
            if name in self.tensors:
                raise ValueError(f"tensor {name!r} is there twice")
            if start + offset + size > len(self._bytes):
                raise ValueError(f"tensor {name!r} reaches past the end")
            self.tensors[name] = GGUFTensor(kind, shape, start + offset, size)

    def _string(self, at: int) -> tuple[str, int]:
        end = self._end(_STRING, at)
        return str(self._bytes[at + 8 : end], encoding="utf-8"), end

    def _array(self, at: int) -> tuple[int, int, int]:
        """The type of an array's elements, their number, and where they begin."""
        kind, count = struct.unpack_from("<IQ", self._bytes, at)
        return kind, count, at + 12

    def _end(self, kind: int, at: int) -> int:
        """Where the value of type ``kind`` at ``at`` ends."""
        if kind == _STRING:
            end: int = at + 8 + _LENGTH.unpack_from(self._bytes, at)[0]
        elif kind == _ARRAY:
            end = self._end_of_array(*self._array(at))
        elif kind in _SCALARS:
            end = at + struct.calcsize("<" + _SCALARS[kind])
        else:
            raise ValueError(f"values of type {kind} are not known")
        if end > len(self._bytes):
            raise ValueError("the header ends early")
        return end

    def _end_of_array(self, kind: int, count: int, at: int) -> int:
        if kind in _SCALARS:
            return at + count * struct.calcsize("<" + _SCALARS[kind])
        if kind != _STRING:
            raise ValueError(f"arrays of values of type {kind} are not known")
        length = _LENGTH.unpack_from
        for _ in range(count):
            at += 8 + length(self._bytes, at)[0]
        return at

    def _decoded(self, kind: int, at: int) -> Any:
        if kind == _STRING:
            return self._string(at)[0]
        if kind != _ARRAY:
            return struct.unpack_from("<" + _SCALARS[kind], self._bytes, at)[0]
        kind, count, at = self._array(at)
        if kind != _STRING:
            return list(struct.unpack_from(f"<{count}{_SCALARS[kind]}", self._bytes, at))
        strings = []
        for _ in range(count):
            text, at = self._string(at)
            strings.append(text)
        return strings
