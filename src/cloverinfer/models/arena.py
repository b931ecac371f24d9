"""Stretches of memory for the weights of a model, in huge pages where the system has them.

Decode reads every weight once per step. In pages of 4 KiB nearly each page costs a walk through the
page tables, on a virtual machine a long one, and reading waits for it. Hence few stretches for many
weights. Owns where a tensor lies in one; does not know what it holds.
"""

from __future__ import annotations

import torch

from ..core.memory import private_memory

HUGE_PAGE = 2 << 20
_ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector."""
_GROWN_BY = 32 << 20


class Arena:
    """Room for ``nbytes`` of tensors, each of which may waste up to 63 bytes more."""

    def __init__(self, nbytes: int, tensors: int) -> None:
        # Anonymous memory: pages are taken from the system as they are first written to. It lives
        # as long as a tensor placed in it.
        room = private_memory(nbytes + tensors * _ALIGNMENT + HUGE_PAGE)
        self._bytes = torch.frombuffer(room, dtype=torch.uint8)
        self._at = -self._bytes.data_ptr() % HUGE_PAGE

    def holds(self, nbytes: int) -> bool:
        """Whether there is room for a tensor of ``nbytes``."""
        return self._at + nbytes <= self._bytes.numel()

    def room(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes`` bytes (uint8), at a multiple of 64."""
        end = self._at + nbytes
        assert end <= self._bytes.numel(), "the arena was made too small"
        room = self._bytes[self._at : end]
        self._at = end + -end % _ALIGNMENT
        return room


class Arenas:
    """Room for tensors of which nobody knows how many will come, in arenas of at least 32 MiB."""

    def __init__(self) -> None:
        self._last: Arena | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        """As an arena's."""
        if self._last is None or not self._last.holds(nbytes):
            self._last = Arena(max(nbytes, _GROWN_BY), 1)
        return self._last.room(nbytes)
