"""What a device keeps of requests that ask for more than a token of their own distribution.

By seat: how often each token was said, and the last few. A row's are written anew where the device
did not choose its last token itself: when it joins, after a step of the host's choosing, where a
step is done again. Counts are of as many seats as such rows have come to need.

It knows neither steps nor how tokens are chosen. Call it with the device's stream current.

Shapes: s rows that sample, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..core.logprobs import TokenLogprobs
from ..core.sampling import MAX_TAIL
from ..models.device_shaping import (
    Asking,
    Lists,
    recalls,
    say_there,
    shape_there,
    step_lists,
    tail_of,
)
from ..models.logprobs import read_scores, score
from ..models.shaping import Shaper
from .device import Device
from .device_inputs import Packing, Tensors, sampled_seats
from .rows import Batch, Row

_LEAST_SEATS = 16


class ScoresUnderWay:
    """Log-probabilities on their way to the host."""

    def __init__(self, rows: Sequence[int], counts: Sequence[int], scores: torch.Tensor) -> None:
        """``scores``: of ``models.logprobs.score``, on the host once the step is over; ``rows``:
        which of the step's tokens they are of."""
        self._rows = rows
        self._counts = counts
        self._scores = scores

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By index in ``tokens``, those of the step; once it is over."""
        chosen = [tokens[row] for row in self._rows]
        found = read_scores(self._scores, chosen, self._counts)
        return dict(zip(self._rows, found, strict=True))


class DeviceShaping:
    """Of a device whose tables have ``seats`` seats."""

    def __init__(self, device: Device, seats: int) -> None:
        self._device = device
        self._seats = seats
        self._tails = device.zeros(seats * MAX_TAIL, torch.int64).view(seats, MAX_TAIL)
        self._counts = self._tails.new_zeros((0, 1), dtype=torch.int32)
        self._told: list[tuple[Row, bool]] = []
        """Rows that the lists are of, and whether each is early."""
        self._lists: Tensors = {}
        self._scored: list[tuple[int, int]] = []
        """Rows that ask for log-probabilities, and of how many likeliest tokens."""

    def shape(self, batch: Batch, logits_sc: torch.Tensor) -> torch.Tensor:
        """float32 logits to choose from, a copy; ``say`` is called next."""
        whole = torch.contiguous_format
        shaped = logits_sc.to(torch.float32, copy=True, memory_format=whole)
        self._recall(batch)
        shape_there(shaped, self._lists, self._tails, self._counts)
        return shaped

    def say(self, tokens_s: torch.Tensor) -> None:
        """Notes what the rows said: tokens of the vocabulary."""
        say_there(tokens_s, self._lists, self._tails, self._counts)

    def score(self, logits_sc: torch.Tensor, tokens_s: torch.Tensor) -> ScoresUnderWay | None:
        """Those that rows ask for, under the model's own logits. ``tokens_s``: ``NO_TOKEN`` where
        there is none, of which anything is said."""
        if not self._scored:
            return None
        rows, counts = (list(each) for each in zip(*self._scored, strict=True))
        if len(rows) < len(logits_sc):
            index = self._lists["scored"]
            logits_sc, tokens_s = logits_sc.index_select(0, index), tokens_s.index_select(0, index)
        there = score(logits_sc, tokens_s.clamp(min=0), max(counts))
        host = self._device.pinned(there.nbytes).view(torch.float64).view(there.shape)
        host.copy_(there, non_blocking=True)
        return ScoresUnderWay(rows, counts, host)

    # -- what rows ask for

    def tell(self, batch: Batch, size: int) -> None:
        """Whose step the calls that follow are of; ``size``: of the vocabulary. Lists are made
        anew where its rows are others than those of the last."""
        early = [
            _is_early(row.shaper, position)
            for row, position in zip(batch.sampled, batch.sample_positions, strict=True)
        ]
        told = list(zip(batch.sampled, early, strict=True))
        if len(told) == len(self._told) and all(
            row is other and now == then
            for (row, now), (other, then) in zip(told, self._told, strict=True)
        ):
            return
        self._told = []
        asking = [
            Asking(i, int(seat), row.shaper.shaping, now)
            for i, (seat, (row, now)) in enumerate(zip(sampled_seats(batch), told, strict=True))
            if row.shaper is not None
        ]
        self._scored = [
            (i, row.sampling.logprobs)
            for i, row in enumerate(batch.sampled)
            if row.sampling.logprobs is not None
        ]
        lists = step_lists(asking, size)
        lists["scored"] = np.array([row for row, _ in self._scored], np.int64)
        self._make_room(lists["count_seats"], size)
        self._lists = self._upload(lists)
        self._told = told

    def _make_room(self, seats: npt.NDArray[np.generic], size: int) -> None:
        needed = int(seats.max(initial=-1)) + 1
        have = len(self._counts)
        if needed <= have:
            return
        rows = max(have, _LEAST_SEATS)
        while rows < needed:
            rows *= 2
        rows = min(rows, self._seats)
        counts = self._device.zeros(rows * size, torch.int32).view(rows, size)
        if have:
            counts[:have].copy_(self._counts)
        self._counts = counts

    def _upload(self, lists: Lists) -> Tensors:
        packing = Packing({name: (x.dtype.name, len(x)) for name, x in lists.items()})
        host = self._device.pinned(packing.nbytes)
        arrays = packing.arrays(host)
        for name, numbers in lists.items():
            arrays[name][:] = numbers
        return packing.tensors(host.to(self._tails.device, non_blocking=True))

    # -- what rows have said

    def _recall(self, batch: Batch) -> None:
        """Writes what the device does not know of rows that it will shape."""
        late = [
            (i, row.tokens, row.shaper, position)
            for i, (row, position) in enumerate(
                zip(batch.sampled, batch.sample_positions, strict=True)
            )
            if row.shaper is not None
            and row.last_at != position - 1
            and recalls(row.shaper.shaping)
        ]
        if late:
            seats_s = sampled_seats(batch)
            self._write([(seats_s[i], *rest) for i, *rest in late])

    def _write(self, late: Sequence[tuple[np.int64, list[int], Shaper, int]]) -> None:
        """By seat, what each was told and has said, its shaper, and how much of it counts."""
        size = self._counts.shape[1]
        tails, at, values, count_seats = [], [], [], []
        for seat, tokens, shaper, position in late:
            said = position - shaper.shaping.num_prompt
            tails.append(tail_of(shaper.tail(tokens, position, min(said, MAX_TAIL))))
            if shaper.shaping.penalises:
                shaper.catch_up(tokens, position)
                ids, counts = shaper.seen()
                count_seats.append(seat)
                at.append(seat * size + ids)
                values.append(counts.astype(np.int64) + 1)
        none = [np.zeros(0, np.int64)]
        there = self._upload(
            {
                "tail_seats": np.array([seat for seat, *_ in late], np.int64),
                "tails": np.array(tails, np.int64).reshape(-1),
                "count_seats": np.array(count_seats, np.int64),
                "at": np.concatenate(at or none),
                "values": np.concatenate(values or none),
            }
        )
        self._tails.index_copy_(0, there["tail_seats"], there["tails"].view(-1, MAX_TAIL))
        if count_seats:
            self._counts.index_fill_(0, there["count_seats"], 0)
            self._counts.view(-1).index_copy_(0, there["at"], there["values"].int())


def _is_early(shaper: Shaper | None, position: int) -> bool:
    if shaper is None:
        return False
    return position - shaper.shaping.num_prompt < shaper.shaping.min_tokens
