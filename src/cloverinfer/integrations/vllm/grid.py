"""Where keys and values lie in an engine's memory, and how one engine's pieces become another's.

A layer's memory is a grid: parts (keys, values) of blocks of heads of groups of tokens, each with
its stride. Two grids that hold the same tokens are matched by the largest piece that is contiguous
in both; re-slicing for other block sizes and other shares of the heads is then a matter of index
arrays alone. Nothing here knows vLLM, PyTorch or a network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from ...core.errors import ConfigError

Index = npt.NDArray[np.int32]


class Grid(msgspec.Struct, frozen=True, dict=True):
    """One layer of one worker. Strides and offsets in bytes, from the start of its region."""

    region: int
    """Which of the worker's regions."""
    base: int
    blocks: int
    block_stride: int
    parts: int
    """1: keys and values of a piece are together; 2: keys, then values."""
    part_stride: int
    heads: int
    head_stride: int
    groups: int
    """Groups of tokens in a block."""
    group_stride: int
    group_tokens: int
    """Tokens that cannot be told apart here; 1 where every token has its own bytes."""
    group_bytes: int
    """Contiguous bytes of one group of one head of one part."""

    @property
    def block_size(self) -> int:
        return self.groups * self.group_tokens

    @property
    def token_bytes(self) -> int:
        """Of one head, both parts."""
        return self.parts * self.group_bytes // self.group_tokens

    @property
    def end(self) -> int:
        """Bytes of the region that are used at least."""
        last = [
            (self.blocks, self.block_stride),
            (self.parts, self.part_stride),
            (self.heads, self.head_stride),
            (self.groups, self.group_stride),
        ]
        return self.base + sum((count - 1) * stride for count, stride in last) + self.group_bytes


class Heads(msgspec.Struct, frozen=True):
    """KV heads of a worker among those of the model: ``first`` to ``first + count - 1``."""

    first: int
    count: int

    def shared_with(self, other: Heads) -> Heads | None:
        first = max(self.first, other.first)
        count = min(self.first + self.count, other.first + other.count) - first
        return Heads(first, count) if count > 0 else None


@dataclass(frozen=True)
class _Axis:
    """One way in which pieces repeat within ``step`` tokens of a block."""

    count: int
    mine: int
    theirs: int


@dataclass(frozen=True)
class Match:
    """How pieces of ``mine`` become pieces of ``theirs``, each ``length`` bytes."""

    mine: Grid
    theirs: Grid
    step: int
    """Tokens that are moved together; divides both block sizes."""
    length: int
    axes: tuple[_Axis, ...]
    my_start: int
    their_start: int
    """Of the first shared head within a block's part."""

    @cached_property
    def pieces(self) -> int:
        """Pieces in ``step`` tokens."""
        return math.prod(axis.count for axis in self.axes)

    def my_offsets(self) -> npt.NDArray[np.int64]:
        """Of every piece of the layer: ``[blocks * steps in a block * pieces]``."""
        return self._offsets(self.mine, self.my_start, [axis.mine for axis in self.axes])

    def their_offsets(self) -> npt.NDArray[np.int64]:
        return self._offsets(self.theirs, self.their_start, [axis.theirs for axis in self.axes])

    def index(
        self, my_blocks: Index, their_blocks: Index, begin: int, end: int, skip: int
    ) -> Index:
        """Rows of a put for positions ``begin`` (a multiple of ``step``) to ``end - 1``, the last
        step of them whole. ``my_blocks`` count from position 0, ``their_blocks`` from ``skip``."""
        positions = np.arange(begin, end, self.step, dtype=np.int64)
        rows = [
            self._rows(grid, blocks, positions - first)
            for grid, blocks, first in (
                (self.mine, my_blocks, 0),
                (self.theirs, their_blocks, skip),
            )
        ]
        return np.stack(rows, axis=1).astype(np.int32)

    def _rows(
        self, grid: Grid, blocks: Index, positions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        which, offset = np.divmod(positions, grid.block_size)
        steps = blocks[which].astype(np.int64) * (grid.block_size // self.step)
        steps += offset // self.step
        rows: npt.NDArray[np.int64] = steps[:, None] * self.pieces + np.arange(self.pieces)
        return rows.ravel()

    def _offsets(self, grid: Grid, start: int, strides: list[int]) -> npt.NDArray[np.int64]:
        groups = self.step // grid.group_tokens
        axes = [
            (grid.blocks, grid.block_stride),
            (grid.block_size // self.step, groups * grid.group_stride),
            *((axis.count, stride) for axis, stride in zip(self.axes, strides, strict=True)),
        ]
        offsets = np.full(1, grid.base + start, np.int64)
        for count, stride in axes:
            offsets = (offsets[:, None] + np.arange(count, dtype=np.int64) * stride).ravel()
        return offsets


def match(mine: Grid, theirs: Grid, my_heads: Heads, their_heads: Heads) -> Match:
    """From prefill's grid to decode's. ``ConfigError`` naming the field and both values where
    pieces of one cannot be pieces of the other."""
    shared = my_heads.shared_with(their_heads)
    assert shared is not None, "workers that share no heads do not meet"
    _check_same("bytes of a token's head", mine.token_bytes, theirs.token_bytes)
    _check_same("parts (keys and values)", mine.parts, theirs.parts)
    step = math.gcd(mine.block_size, theirs.block_size)
    if mine.group_tokens != theirs.group_tokens or step % mine.group_tokens:
        raise ConfigError(
            f"block size: {mine.block_size} at prefill and {theirs.block_size} at decode, and "
            "blocks of this layout cannot be cut: set --block-size to the same"
        )
    groups = step // mine.group_tokens
    left = [
        _Axis(groups, mine.group_stride, theirs.group_stride),
        _Axis(shared.count, mine.head_stride, theirs.head_stride),
        _Axis(mine.parts, mine.part_stride, theirs.part_stride),
    ]
    length, axes = _grow(mine.group_bytes, left)
    return Match(
        mine,
        theirs,
        step,
        length,
        axes,
        (shared.first - my_heads.first) * mine.head_stride,
        (shared.first - their_heads.first) * theirs.head_stride,
    )


def _grow(length: int, axes: list[_Axis]) -> tuple[int, tuple[_Axis, ...]]:
    """Takes into the piece every axis along which it is contiguous at both ends; the rest stays."""
    left = [axis for axis in axes if axis.count > 1]
    while True:
        for axis in left:
            if axis.mine == axis.theirs == length:
                length *= axis.count
                left.remove(axis)
                break
        else:
            return length, tuple(left)


def _check_same(what: str, mine: object, theirs: object) -> None:
    if mine != theirs:
        raise ConfigError(f"{what}: {mine} at prefill and {theirs} at decode")
