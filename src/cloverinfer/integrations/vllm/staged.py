"""A cache on a GPU over wires that reach host memory alone: copies there, and from there.

What leaves goes through a circle of host memory, what comes lands in blocks of host memory that are
as the device's own, close together. Which transfers these are, and when memory may be used again,
is for ``outgoing`` and ``inbox`` to say.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from ...core.errors import ConfigError, DeadlineError, TransportError
from ...nodes.copies import Copies, Moment
from ...nodes.stores import runs
from ...transport import Region, RegionRef, Slices, Ticket
from ...transport.base import DEFAULT_TIMEOUT
from .grid import Grid, Heads, Index, Match, match

MIB = 1 << 20
CIRCLE_BYTES = 64 * MIB
"""Of what leaves: half of it is put while the other half is filled."""
_ALIGNMENT = 64
Register = Callable[[int], Region]


@dataclass(frozen=True)
class Device:
    """The engine's cache as copies take it."""

    grids: list[Grid]
    storages: list[Any]
    """What the tensors lie in, by region."""
    copies: Copies

    def rows(self, region: int, unit: int) -> torch.Tensor:
        """``[n, unit]`` bytes of a region, from its start."""
        storage = self.storages[region]
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return whole[: len(whole) // unit * unit].view(-1, unit)


class Stage:
    """Of one wire: both ways. ``nbytes``: of where blocks land."""

    def __init__(self, device: Device, register: Register, nbytes: int) -> None:
        self.landing = Landing(device, register, nbytes)
        self.circle = Circle(device.copies, register(CIRCLE_BYTES))

    def close(self) -> None:
        self.circle.close()


class Landing:
    """Blocks of host memory, each for one of the device's, in all layers."""

    def __init__(self, device: Device, register: Register, nbytes: int) -> None:
        """``ConfigError`` with both numbers where ``nbytes`` do not hold one block."""
        sizes = [_block_bytes(grid) for grid in device.grids]
        blocks = min(nbytes // sum(sizes), device.grids[0].blocks)
        if blocks < 1:
            raise ConfigError(
                f"a block has {sum(sizes)} bytes, and {nbytes} are there for blocks that come over "
                "wires of host memory: raise staging_mib"
            )
        self.region = register(sum(-(-size * blocks // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        self.grids: list[Grid] = []
        base = 0
        for grid, size in zip(device.grids, sizes, strict=True):
            self.grids.append(_compact(grid, base, blocks))
            base += -(-size * blocks // _ALIGNMENT) * _ALIGNMENT
        self.blocks = blocks
        self._device = device
        self._free = list(range(blocks - 1, -1, -1))
        self._ways: dict[int, _Way] = {}
        self._locked = False

    def take(self, count: int) -> list[int] | None:
        """As many blocks, which adjoin where they can; None where there are not so many now."""
        if count > len(self._free):
            return None
        self._free.sort(reverse=True)
        return [self._free.pop() for _ in range(count)]

    def give(self, blocks: list[int]) -> None:
        self._free += blocks

    def store(self, layer: int, landed: Sequence[int], blocks: Sequence[int]) -> Moment:
        """Begins to copy a layer's blocks that have ``landed`` to the device's own ``blocks``.
        From one thread; memory of either must stay until the moment it returns."""
        copies, grid = self._device.copies, self.grids[layer]
        if not self._locked:
            copies.lock(self.region)
            self._locked = True
        if layer not in self._ways:
            heads = Heads(0, grid.heads)
            self._ways[layer] = _Way(match(grid, self._device.grids[layer], heads, heads))
        way = self._ways[layer]
        memory = torch.frombuffer(self.region.buffer, dtype=torch.uint8)
        size = grid.block_stride
        sources = [
            memory[grid.base + first * size : grid.base + end * size].view(-1, way.unit)
            for first, end in runs(landed)
        ]
        rows = self._device.rows(self._device.grids[layer].region, way.unit)
        return copies.store(rows, way.rows_of(landed, blocks), sources)


class _Way:
    """From one layer's landed blocks to the device's, in rows of ``unit`` bytes."""

    def __init__(self, between: Match) -> None:
        self._match = between
        self._landed, self._device = between.my_offsets(), between.their_offsets()
        self.unit = _unit(between.length, self._device)
        self._steps = between.mine.block_size // between.step

    def rows_of(self, landed: Sequence[int], blocks: Sequence[int]) -> Index:
        """The device's rows, in the order in which the landed blocks' bytes lie."""
        size = self._match.mine.block_size
        here, there = np.array(landed, np.int32), np.array(blocks, np.int32)
        index = self._match.index(here, there, 0, len(here) * size, 0)
        by_block = index.reshape(len(here), -1, 2)
        order = np.argsort(self._landed[by_block[:, :, 0]], axis=1, kind="stable")
        pieces = np.take_along_axis(by_block[:, :, 1], order, axis=1).ravel()
        return expanded(self._device[pieces], self._match.length, self.unit)


class Circle:
    """Host memory that is filled and put from, over and over. Used by the sender's thread, but for
    ``look`` and ``close``."""

    def __init__(self, copies: Copies, region: Region) -> None:
        self.region = region
        self.largest = region.ref.nbytes // 2
        """Bytes of one stretch at most."""
        self.copies = copies
        self._size = region.ref.nbytes
        self._begin = self._end = 0
        """What is in use, counted on and on."""
        self._used: deque[tuple[int, Ticket]] = deque()
        """Where stretches end, and the puts that read them."""
        self._locked = self._closed = False
        self._changed = threading.Condition()

    @cached_property
    def memory(self) -> torch.Tensor:
        return torch.frombuffer(self.region.buffer, dtype=torch.uint8)

    def take(self, nbytes: int, unit: int) -> int:
        """Offset of a free stretch, a multiple of ``unit``. ``TransportError`` where the puts
        before do not end."""
        assert 0 < nbytes <= self.largest
        if not self._locked:
            self.copies.lock(self.region)
            self._locked = True
        lap, at = divmod(self._end, self._size)
        at = -(-at // unit) * unit
        if at + nbytes > self._size:
            lap, at = lap + 1, 0
        start = lap * self._size + at
        with self._changed:
            if not self._changed.wait_for(lambda: self._room(start + nbytes), DEFAULT_TIMEOUT):
                raise DeadlineError(f"puts did not end in {DEFAULT_TIMEOUT:g} s")
            if self._closed:
                raise TransportError("the connector is closing")
        self._end = start + nbytes
        return at

    def put(self, ticket: Ticket) -> None:
        """``ticket`` reads the stretch that was taken last."""
        self._used.append((self._end, ticket))

    def _room(self, end: int) -> bool:
        while self._used and self._used[0][1].done:
            self._begin = self._used.popleft()[0]
        if not self._used:
            self._begin = max(self._begin, end - self._size)
        return self._closed or end - self._begin <= self._size

    def look(self) -> None:
        """Some puts have ended."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Ends a wait with ``TransportError``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Outlet:
    """One layer's way from the device to one peer, through the circle."""

    def __init__(self, device: Device, circle: Circle, between: Match) -> None:
        self._device, self._circle, self._match = device, circle, between
        self._offsets = between.my_offsets()
        self._unit = _unit(between.length, self._offsets)
        self._parts = between.length // self._unit
        steps = between.theirs.block_size // between.step
        block = steps * between.pieces * between.length
        self.largest = circle.largest // block
        """Blocks of the peer's that go at once."""
        if self.largest < 1:
            raise ConfigError(
                f"a block has {block} bytes in a layer, and {circle.largest} are there for blocks "
                "on their way to wires of host memory: use smaller blocks"
            )

    @property
    def local(self) -> Slices:
        at = np.arange(0, self._circle.region.ref.nbytes // self._unit, dtype=np.int64)
        return Slices(self._circle.region, at * self._unit, self._unit)

    def remote(self, region: RegionRef) -> Slices:
        """The peer's pieces, cut as the device's are."""
        starts = self._match.their_offsets()
        parts = np.arange(self._parts, dtype=np.int64) * self._unit
        return Slices(region, (starts[:, None] + parts).ravel(), self._unit)

    def fetch(self, rows: Index, ready: Moment) -> Index:
        """Copies pieces ``rows[:, 0]`` into the circle once they are ``ready``; the index of a put
        of them to the peer's ``rows[:, 1]``."""
        count = len(rows) * self._parts
        at = self._circle.take(count * self._unit, self._unit)
        target = self._circle.memory[at : at + count * self._unit].view(count, self._unit)
        source = self._device.rows(self._match.mine.region, self._unit)
        wanted = expanded(self._offsets[rows[:, 0]], self._match.length, self._unit)
        self._device.copies.fetch([target], source, wanted, ready).wait()
        parts = np.arange(self._parts, dtype=np.int32)
        theirs = (rows[:, 1, None] * self._parts + parts).ravel()
        first = at // self._unit
        mine = np.arange(first, first + count, dtype=np.int32)
        return np.stack([mine, theirs], axis=1).astype(np.int32)


def expanded(offsets: npt.NDArray[np.int64], length: int, unit: int) -> Index:
    """Pieces of ``length`` bytes at ``offsets`` as numbers of rows of ``unit`` bytes."""
    parts = np.arange(length // unit, dtype=np.int64)
    rows: Index = (offsets[:, None] // unit + parts).ravel().astype(np.int32)
    return rows


def _unit(length: int, offsets: npt.NDArray[np.int64]) -> int:
    """The most bytes of which both pieces and their offsets are multiples."""
    return math.gcd(length, int(np.gcd.reduce(offsets)))


def _block_bytes(grid: Grid) -> int:
    return grid.parts * grid.heads * grid.groups * grid.group_bytes


def _compact(grid: Grid, base: int, blocks: int) -> Grid:
    """The same with nothing between, block after block; within a block in the same order."""
    counts = {"part": grid.parts, "head": grid.heads, "group": grid.groups}
    strides, size = {}, grid.group_bytes
    for name in sorted(counts, key=lambda name: int(getattr(grid, f"{name}_stride"))):
        strides[f"{name}_stride"] = size
        size *= counts[name]
    return msgspec.structs.replace(
        grid, region=0, base=base, blocks=blocks, block_stride=size, **strides
    )
