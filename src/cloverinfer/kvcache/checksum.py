"""Checksums of a pool's blocks: the same number at both ends of a transfer that went well."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .. import _native
from .layout import PoolLayout


class BlockSums:
    """CRC-32C over blocks of one layer of a pool in the canonical layout."""

    def __init__(self, layout: PoolLayout, pool: memoryview) -> None:
        self._layout = layout
        self._pool = pool

    def of(self, layer: int, blocks: npt.NDArray[np.int32]) -> int:
        """Of the blocks' own checksums, in their order."""
        length = self._layout.layer_block_bytes(layer)
        offsets = self._layout.layer_offsets[layer] + blocks.astype(np.int64) * length
        return _native.crc32c_slices(self._pool, offsets, length)
