"""What the two sides of a check say to each other, in messages of an endpoint."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from ..transport import RegionRef
from ..transport.choice import Offer
from .report import Finding

LATENCY_BYTES = 4096
ACK = 0xFFFFFFFF
"""The notice with which the far side says that all has come."""


class Ask(msgspec.Struct, frozen=True):
    """The near side asks; every ask has one answer."""

    verb: str
    """open, meet, check, fill, echo, count, close, findings, offer, gpus or end."""
    transport: str = ""
    address: str = ""
    region: RegionRef | None = None
    nbytes: int = 0
    length: int = 0
    """Bytes of a piece."""
    count: int = 0
    seed: int = 0
    good: bool = False
    """With ``end``: the verdict."""
    device: int | None = None
    """With ``open``: the GPU whose memory the region is; None: the host's."""


class Answer(msgspec.Struct, frozen=True):
    error: str = ""
    """Why it could not be done; empty where it was."""
    address: str = ""
    region: RegionRef | None = None
    closed: bool = False
    """To ``close``."""
    wrong: int = 0
    """Bytes that are not what they should be."""
    findings: list[Finding] = []
    offer: Offer | None = None
    gpus: int = 0
    """How many the far side has."""


def pattern(nbytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Bytes that tell where they belong: every aligned eight hold their index, mixed with the
    seed, so that pieces which swap places or are not written show."""
    words = np.arange((nbytes + 7) // 8, dtype=np.uint64) + np.uint64(seed << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)  # odd, so that no two words become the same
    words ^= words >> np.uint64(32)
    return words.view(np.uint8)[:nbytes]


def pieces(nbytes: int, length: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Offsets of the whole pieces of ``length`` in ``nbytes``, and an index that puts each to its
    own place, in an order in which no two that adjoin follow each other."""
    offsets = np.arange(nbytes // length, dtype=np.int64) * length
    order = np.concatenate([np.arange(i, len(offsets), 2) for i in (0, 1)]).astype(np.int32)
    return offsets, np.repeat(order[:, None], 2, axis=1)
