"""The header of GGUF files: what the gguf package reads, and damage anywhere in it."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from cloverinfer.core.errors import ModelError
from cloverinfer.models.gguf_file import GGUFFile
from cloverinfer.models.gguf_header import GGUFHeader


def write(path: Path) -> Path:
    """A file with a value of every type and tensors of several."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    for bits in (8, 16, 32, 64):
        getattr(writer, f"add_uint{bits}")(f"u{bits}", 2**bits - 2)
        getattr(writer, f"add_int{bits}")(f"i{bits}", -(2 ** (bits - 1)))
    writer.add_float32("f32", 1.5)
    writer.add_float64("f64", 1e300)
    writer.add_bool("flag", True)
    writer.add_string("text", "été")
    writer.add_array("strings", ["a", "", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("floats", [0.5, 2.5])
    writer.add_array("flags", [True, False])
    numbers = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    writer.add_tensor("plain", numbers)
    writer.add_tensor("half", numbers.astype(np.float16))
    for kind in (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, gguf.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_it_reads_what_the_package_reads(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf")
    header, theirs = GGUFHeader(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            found, expected = header.value(key), field.contents()
            assert (found, type(found)) == (expected, type(expected)), key
    assert header.value("no such key") is None
    assert list(header.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        entry, data = header.tensors[tensor.name], header.data(tensor.name)
        assert (entry.kind, entry.offset) == (tensor.tensor_type, tensor.data_offset)
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert data.dtype == tensor.data.dtype
        assert np.array_equal(data, tensor.data)


def test_a_header_that_ends_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    for end in range(0, len(whole) - 1, 11):
        path.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            GGUFFile(path)


def header_of(values: bytes, count: int = 1, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, 0, count) + values


def entry(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GGML" + header_of(b"", 0)[4:], "no GGUF file"),
        (header_of(b"", 0, version=3 << 24), "little-endian"),
        (header_of(entry("k", 99, b"")), "type 99"),
        (header_of(entry("k", 9, struct.pack("<IQIQ", 9, 1, 4, 0))), "type 9"),
        (header_of(entry("k", 4, b"\0\0\0\0") * 2, 2), "twice"),
        (header_of(entry("k", 9, struct.pack("<IQ", 4, 2**60))), "ends early"),
        (header_of(entry("k", 9, struct.pack("<IQ", 8, 2**60))), "ends early"),
        (header_of(entry("k", 8, struct.pack("<Q", 2**63))), "ends early"),
        (header_of(entry("general.alignment", 4, b"\0\0\0\0")), "alignment"),
        (header_of(entry("general.alignment", 8, struct.pack("<Q", 1) + b"x")), "alignment"),
    ],
)
def test_nonsense_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match=rf"odd\.gguf.*{reason}"):
        GGUFFile(path)
