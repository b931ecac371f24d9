"""A step's tensors on a GPU, by one copy from pinned memory.

Shapes as in ``Batch``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from .rows import Batch

_FIELDS = (
    "token_ids_t",
    "positions_t",
    "query_starts",
    "lengths_r",
    "block_tables_rb",
    "slots_t",
    "sample_tokens",
)
ALIGNMENT = 16
"""Bytes between which tensors begin, whatever their types."""


def offsets_of(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where pieces of these sizes begin, one after the other, and the bytes of all."""
    offsets, at = [], 0
    for size in sizes:
        offsets.append(at)
        at += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, at


class BatchCopier:
    """Of one node, to ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = device.type == "cuda"
        self._host = torch.empty(0, dtype=torch.uint8)
        self._copied = torch.cuda.Event() if self._pinned else None

    def move(self, batch: Batch) -> Batch:
        """The same step with its tensors on the device. Waits where the last copy has not been
        made yet, whose memory this one uses."""
        parts: dict[str, torch.Tensor] = {
            name: part for name in _FIELDS if (part := getattr(batch, name)) is not None
        }
        offsets, total = offsets_of([part.nbytes for part in parts.values()])
        host = self._room(total)
        for at, part in zip(offsets, parts.values(), strict=True):
            _piece(host, at, part).copy_(part)
        moved = host.to(self._device, non_blocking=True, copy=True)
        if self._copied is not None:
            self._copied.record()
        pieces = zip(parts.items(), offsets, strict=True)
        return dataclasses.replace(
            batch, **{name: _piece(moved, at, part) for (name, part), at in pieces}
        )

    def _room(self, nbytes: int) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        if self._host.numel() < nbytes:
            self._host = torch.empty(2 * nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._host[:nbytes]


def _piece(packed: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """The part of ``packed`` that begins at byte ``at``, of the type and shape of ``like``."""
    return packed[at : at + like.nbytes].view(like.dtype).view(like.shape)
