"""CRC-32C against published values and a bit-by-bit reference, with and without hardware."""

import numpy as np
import pytest

from cloverinfer import _native

KNOWN = {  # RFC 3720, appendix B.4, and the check value of the catalogue of CRCs
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
}


def reference(data, crc=0):
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("hardware", [False, True])
def test_published_values(hardware):
    for data, crc in KNOWN.items():
        assert _native.crc32c(data, hardware=hardware) == crc


def test_every_length_and_alignment():
    data = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    for start in range(9):
        for size in (0, 1, 7, 8, 9, 63, 64, 100, 191):
            piece = data[start : start + size]
            wanted = reference(piece.tobytes())
            assert _native.crc32c(piece) == wanted
            assert _native.crc32c(piece, hardware=False) == wanted


@pytest.mark.parametrize("count", range(8))
@pytest.mark.parametrize("length", [0, 5, 24, 27])
def test_slices_are_the_checksum_of_their_checksums(count, length):
    rng = np.random.default_rng(count)
    data = rng.integers(0, 256, 300, np.uint8)
    offsets = rng.integers(0, 300 - length, count).astype(np.int64)
    crcs = [reference(data[at : at + length].tobytes()) for at in offsets]
    wanted = reference(np.array(crcs, "<u4").tobytes())
    assert _native.crc32c_slices(data, offsets, length) == wanted


def test_any_flipped_bit_shows():
    data = np.zeros(64, np.uint8)
    offsets = np.array([0, 16, 32, 48])
    whole = _native.crc32c_slices(data, offsets, 16)
    for bit in range(0, 512, 7):
        data[bit // 8] ^= 1 << bit % 8
        assert _native.crc32c_slices(data, offsets, 16) != whole
        data[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize(("offset", "length"), [(-1, 4), (7, 2), (0, 9), (0, -1), (2**62, 2**62)])
def test_slices_outside_are_refused(offset, length):
    with pytest.raises(ValueError, match="outside"):
        _native.crc32c_slices(bytes(8), np.array([offset]), length)
    with pytest.raises(ValueError, match="contiguous"):
        _native.crc32c(np.zeros((2, 2), np.uint16))
