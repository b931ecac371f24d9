"""Rows that have one token each: where it stands and where it is stored, in tensors that are kept.

They are written anew for each step, number by number: a step has come and gone before the next of
its lane is made, and the processor has forgotten the code of every operation on arrays meanwhile.
It knows neither the tokens nor what is done with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .rows import BlockTables

FEW_ROWS = 64
"""Up to so many rows numbers are written one by one."""


def written(count: int, dtype: torch.dtype) -> tuple[torch.Tensor, memoryview]:
    """A tensor, and its numbers to be written."""
    tensor = torch.zeros(count, dtype=dtype)
    return tensor, memoryview(tensor.numpy())


class OneTokenRows:
    """Of one lane. The same tensors for as long as the same requests are its rows and, where
    ``tables`` are there to be followed, none of them changes."""

    def __init__(self, tables: BlockTables | None) -> None:
        self._tables = tables
        self._last: tuple[int, list[int]] = (-1, [])
        """Version of the tables, and the requests."""
        self.positions_t: torch.Tensor
        self.query_starts: torch.Tensor
        """int32 ``[r + 1]``."""
        self.lengths_r: torch.Tensor
        """int32; tokens in the cache once the step's are appended."""
        self.block_tables_rb: torch.Tensor | None = None
        self.slots_t: torch.Tensor | None = None

    def write(self, requests: list[int], positions: Sequence[int]) -> bool:
        """A step of these rows, over the one before; whether all tensors were made anew."""
        now = -1 if self._tables is None else self._tables.version, requests
        anew = now != self._last
        if anew:
            self._make(requests)
            self._last = now
        for i, position in enumerate(positions):
            self._positions[i] = position
            self._lengths[i] = position + 1
        if self._tables is not None:
            self._write_slots(self._tables.block_size, positions)
        return anew

    def _write_slots(self, size: int, positions: Sequence[int]) -> None:
        width = self._width
        for i, position in enumerate(positions):
            block, offset = divmod(position, size)
            assert block < width, "a row is longer than its block table"
            self._slots[i] = self._blocks[i * width + block] * size + offset

    def _make(self, requests: Sequence[int]) -> None:
        count = len(requests)
        self.positions_t, self._positions = written(count, torch.int64)
        self.lengths_r, self._lengths = written(count, torch.int32)
        self.query_starts = torch.arange(count + 1, dtype=torch.int32)
        if self._tables is None:
            return
        self.slots_t, self._slots = written(count, torch.int64)
        tables_rb = self._tables.whole(requests)
        self.block_tables_rb = torch.from_numpy(tables_rb)
        self._blocks, self._width = tables_rb.ravel().tolist(), tables_rb.shape[1]
