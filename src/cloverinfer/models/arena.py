"""One stretch of memory for all weights of a model, in huge pages where the system has them.

Decode reads every weight once per step. In pages of 4 KiB nearly each page costs a walk through the
page tables, on a virtual machine a long one, and reading waits for it.
"""

from __future__ import annotations

import mmap

import torch

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector."""


class Arena:
    """Room for ``nbytes`` of tensors, each of which may waste up to 63 bytes more."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        # Anonymous memory: pages are taken from the system as they are first written to. It lives
        # as long as a tensor placed in it.
        room = mmap.mmap(-1, nbytes + tensors * _ALIGNMENT + HUGE_PAGE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            room.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(room, dtype=torch.uint8)
        self._at = -self._bytes.data_ptr() % HUGE_PAGE

    def room(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes`` bytes (uint8), at a multiple of 64."""
        end = self._at + nbytes
        assert end <= self._bytes.numel(), "the arena was made too small"
        room = self._bytes[self._at : end]
        self._at = end + -end % _ALIGNMENT
        return room
