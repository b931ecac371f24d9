"""A step's inputs as one buffer, so that one copy takes them to the device.

A field is an array of a type and a size; fields follow each other, aligned. Which fields a step
has is said here; what is done with them is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ..models.device_sampling import DRAW_DTYPES
from ..wire.messages import Sampling
from .rows import Batch

_ALIGNMENT = 16
_TYPES = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
Arrays = dict[str, npt.NDArray[np.generic]]
Tensors = dict[str, torch.Tensor]

DRAW_FIELDS = {name: _NAMES[dtype] for name, dtype in DRAW_DTYPES.items()}
"""What choosing a token needs; for greedy rows all 0."""


class Packing:
    """Where each field of a buffer lies."""

    def __init__(self, fields: Mapping[str, tuple[str, int]]) -> None:
        """``fields``: type and size by name."""
        self._places: dict[str, tuple[int, int, str]] = {}
        at = 0
        for name, (dtype, size) in fields.items():
            end = at + size * np.dtype(dtype).itemsize
            self._places[name] = at, end, dtype
            at = -(-end // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = at

    def arrays(self, buffer: torch.Tensor) -> Arrays:
        """The fields of a buffer on the host."""
        memory = buffer.numpy()
        return {name: memory[a:b].view(dtype) for name, (a, b, dtype) in self._places.items()}

    def tensors(self, buffer: torch.Tensor) -> Tensors:
        """The fields of a buffer on the device."""
        return {name: buffer[a:b].view(_TYPES[t]) for name, (a, b, t) in self._places.items()}


def decode_packing(rows: int, changes: int) -> Packing:
    """Of a step of ``rows`` rows of one token each, all tokens on the device already."""
    fields = {
        "positions": ("int64", rows),
        "slots": ("int64", rows),
        "seats": ("int64", rows),
        "lengths": ("int32", rows),
    }
    fields |= {name: (dtype, rows) for name, dtype in DRAW_FIELDS.items()}
    return Packing(fields | _change_fields(changes))


def mixed_packing(tokens: int, rows: int, samples: int, unknown: int, changes: int) -> Packing:
    """Of any step. ``unknown``: tokens that only the device knows."""
    fields = {
        "tokens": ("int64", tokens),
        "positions": ("int64", tokens),
        "slots": ("int64", tokens),
        "starts": ("int32", rows + 1),
        "seats": ("int64", rows),
        "lengths": ("int32", rows),
        "sample_at": ("int64", samples),
        "sample_seats": ("int64", samples),
        "unknown_at": ("int64", unknown),
        "unknown_seats": ("int64", unknown),
    }
    fields |= {name: (dtype, samples) for name, dtype in DRAW_FIELDS.items()}
    return Packing(fields | _change_fields(changes))


def _change_fields(changes: int) -> dict[str, tuple[str, int]]:
    return {"change_at": ("int64", changes), "change_to": ("int32", changes)}


def fill_draws(arrays: Arrays, params: list[Sampling], positions: list[int]) -> None:
    """``positions``: that each token will take. Fields may be longer; what is past the last row
    becomes greedy."""
    count = len(params)
    for name in DRAW_FIELDS:
        arrays[name][count:] = 0
    if not any(p.temperature > 0 for p in params):
        for name in DRAW_FIELDS:
            arrays[name][:count] = 0
        return
    arrays["temperature"][:count] = [p.temperature for p in params]
    arrays["top_k"][:count] = [p.top_k for p in params]
    arrays["top_p"][:count] = [p.top_p for p in params]
    arrays["min_p"][:count] = [p.min_p for p in params]
    mask = (1 << 64) - 1
    seeds = np.array([p.seed & mask for p in params], np.uint64)
    arrays["uniform"][:count] = uniforms(seeds, np.array(positions, np.uint64))


def fill_mixed(arrays: Arrays, batch: Batch, unknown: npt.NDArray[np.int64]) -> None:
    """All of ``mixed_packing`` but the changes. ``unknown``: indices of tokens."""
    assert batch.slots_t is not None
    assert batch.seats_r is not None
    starts, ends = batch.query_starts.numpy(), batch.sample_tokens.numpy()
    positions = batch.positions_t.numpy()
    rows = np.searchsorted(starts, unknown, side="right") - 1
    for row, at in zip(rows, unknown, strict=True):
        of = batch.rows[row]
        assert of.last_at == positions[at], f"request {of.request}: nobody knows a token"
    arrays["tokens"][:] = np.maximum(batch.token_ids_t.numpy(), 0)
    arrays["positions"][:] = positions
    arrays["slots"][:] = batch.slots_t.numpy()
    arrays["starts"][:] = starts
    arrays["seats"][:] = batch.seats_r
    arrays["lengths"][:] = batch.lengths_r.numpy()
    arrays["sample_at"][:] = ends
    arrays["sample_seats"][:] = sampled_seats(batch)
    arrays["unknown_at"][:] = unknown
    arrays["unknown_seats"][:] = batch.seats_r[rows]
    fill_draws(arrays, [row.sampling for row in batch.sampled], batch.sample_positions)


def sampled_seats(batch: Batch) -> npt.NDArray[np.int64]:
    """Of the rows that sample."""
    assert batch.seats_r is not None
    starts, ends = batch.query_starts.numpy(), batch.sample_tokens.numpy()
    return batch.seats_r[np.searchsorted(starts, ends, side="right") - 1]


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """``models.sampling.uniform`` of many."""
    with np.errstate(over="ignore"):
        mixed = _splitmix64(_splitmix64(seeds) ^ positions)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _splitmix64(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
