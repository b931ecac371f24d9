"""What a device keeps of requests between steps, by seat: block tables and the last token.

All is written by work on the device's stream, in the order of the steps: a seat that a request has
left may be another's in the next step, though the one before it is still running.

Shapes: r rows, b blocks of the longest table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from .device import Device
from .device_inputs import Packing, Tensors
from .rows import UNKNOWN, Batch, Change, seats_for

Changed = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]
"""Places in the tables, and the blocks to write there."""


@dataclasses.dataclass(frozen=True)
class DeviceShape:
    """How large a node's steps may be."""

    max_rows: int
    max_blocks: int
    """Of one request."""


class DeviceSeats:
    """Call it with the device's stream current."""

    def __init__(self, device: Device, shape: DeviceShape) -> None:
        self._device = device
        self._width = shape.max_blocks
        self.scratch = seats_for(shape.max_rows)
        """The seat of rows that only fill up a graph."""
        self._last_tokens = device.zeros(self.scratch + 1, torch.int64)
        # Never read past a row's length, so what a seat's last request left there may stay.
        self._tables = device.zeros((self.scratch + 1) * self._width, torch.int32)
        self._changes: list[Change] = []

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.to(self._tables.device, non_blocking=True)

    # -- tokens

    def tokens(self, seats_r: torch.Tensor) -> torch.Tensor:
        """Those sampled last, a copy."""
        return self._last_tokens.index_select(0, seats_r)

    def keep(self, seats_r: torch.Tensor, tokens_r: torch.Tensor) -> None:
        self._last_tokens.scatter_(0, seats_r, tokens_r)

    def bring(self, batch: Batch) -> None:
        """Of a step of one token a row: puts tokens in their seats where the device's are not
        those that the rows go on from."""
        assert batch.seats_r is not None
        positions = batch.positions_t.tolist()
        late = [i for i, row in enumerate(batch.rows) if row.last_at != positions[i]]
        if not late:
            return
        tokens = batch.token_ids_t.numpy()[late]
        assert (tokens != UNKNOWN).all(), "nobody knows the token that a row goes on from"
        packing = Packing({"seats": ("int64", len(late)), "tokens": ("int64", len(late))})
        host = self._device.pinned(packing.nbytes)
        arrays = packing.arrays(host)
        arrays["seats"][:], arrays["tokens"][:] = batch.seats_r[late], tokens
        there = packing.tensors(self.upload(host))
        self.keep(there["seats"], there["tokens"])

    # -- block tables

    def tables(self, seats_r: torch.Tensor) -> torch.Tensor:
        """``[r, b]``, a copy."""
        return self._tables.view(-1, self._width).index_select(0, seats_r)

    def note(self, changes: Sequence[Change]) -> None:
        """To be written with the next step."""
        self._changes += changes

    def changes(self) -> Changed:
        """What was noted and not written yet: a step that cannot be launched may leave some."""
        at: list[int] = []
        blocks: list[int] = []
        for seat, column, new in self._changes:
            assert seat < self.scratch, "more requests than seats"
            assert column + len(new) <= self._width, "a request is longer than its table"
            first = seat * self._width + column
            at.extend(range(first, first + len(new)))
            blocks.extend(new)
        return np.array(at, np.int64), np.array(blocks, np.int32)

    def write(self, there: Tensors, count: int) -> None:
        """The first ``count`` of a packing's changes, which are all there are."""
        if count:
            self._tables.scatter_(0, there["change_at"][:count], there["change_to"][:count])
        self._changes.clear()

    def write_apart(self, changed: Changed) -> None:
        """Changes that come in no packing of a step."""
        count = len(changed[0])
        packing = Packing({"change_at": ("int64", count), "change_to": ("int32", count)})
        host = self._device.pinned(packing.nbytes)
        arrays = packing.arrays(host)
        arrays["change_at"][:], arrays["change_to"][:] = changed
        self.write(packing.tensors(self.upload(host)), count)
