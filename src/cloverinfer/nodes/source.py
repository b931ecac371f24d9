"""Where puts of a pool's blocks read from: the pool itself, or a mirror of some of it in host
memory.

Used by the sender's thread alone, but for ``look`` and ``close``. What is put where, and whether it
arrived, is the pushers' business.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from .. import _native
from ..core.errors import ConfigError, DeadlineError, TransportError
from ..kvcache.layout import PoolLayout
from ..transport.base import DEFAULT_TIMEOUT, Region, RegionRef, Slices, Ticket
from .copies import NOW, Copies, Moment

Rows = npt.NDArray[np.int32]


def layer_slices(region: Region | RegionRef, layout: PoolLayout, layer: int) -> Slices:
    """Every block of one layer as a slice."""
    length = layout.layer_block_bytes(layer)
    offsets = layout.layer_offsets[layer] + np.arange(layout.num_blocks, dtype=np.int64) * length
    return Slices(region, offsets, length)


@dataclass
class Held:
    """Blocks of one layer, ready to be put."""

    rows: Rows
    """Their numbers among ``Source.slices``."""
    after: Moment
    """They may be read from then on."""
    ticket: Ticket | None = None
    """Of the put that reads them, once it is made: until it is done they stay."""


class Source(ABC):
    """Blocks of one pool as the puts to one receiver read them, held while a put does."""

    largest: int
    """Blocks of one put at most."""

    @abstractmethod
    def slices(self, layer: int) -> Slices:
        """What puts of one layer read."""

    @abstractmethod
    def hold(
        self, layer: int, blocks: Rows, ready: Moment
    ) -> contextlib.AbstractContextManager[Held]:
        """Blocks that are complete from ``ready`` on. ``TransportError`` where the puts before do
        not end."""

    def sum_of(self, layer: int, held: Held) -> int:
        """The checksum of what is held, which is host memory."""
        slices = self.slices(layer)
        assert isinstance(slices.region, Region)
        offsets = slices.offsets[held.rows]
        return _native.crc32c_slices(slices.region.buffer, offsets, slices.length)

    @abstractmethod
    def look(self) -> None:
        """From the node's thread: some puts have ended."""

    @abstractmethod
    def close(self) -> None:
        """From the node's thread: ends a wait with ``TransportError``."""


class PoolSource(Source):
    """The pool's own region."""

    def __init__(self, region: Region, layout: PoolLayout) -> None:
        self.largest = layout.num_blocks
        self._slices = [layer_slices(region, layout, i) for i in range(layout.num_layers)]

    def slices(self, layer: int) -> Slices:
        return self._slices[layer]

    @contextlib.contextmanager
    def hold(self, layer: int, blocks: Rows, ready: Moment) -> Iterator[Held]:
        yield Held(blocks, ready)

    def look(self) -> None:
        """Nothing waits for puts to end."""

    def close(self) -> None:
        """Nothing waits."""


class MirroredPool(Protocol):
    """What a mirror knows of its pool: ``rows`` are bytes ``[blocks, size]`` of one layer."""

    layout: PoolLayout
    copies: Copies

    def rows(self, layer: int) -> torch.Tensor: ...


class Mirror(Source):
    """Slots of page-locked host memory, each for one block of one layer, taken in a circle. Blocks
    are copied there as their layer ends, beside computing, while the puts before them go on."""

    def __init__(self, pool: MirroredPool, register: Callable[[int], Region], nbytes: int) -> None:
        """``ConfigError`` with both numbers where ``nbytes`` do not hold one block of a layer."""
        layout = pool.layout
        self._pool = pool
        self._stride = max(layout.layer_block_bytes(i) for i in range(layout.num_layers))
        self._slots = min(nbytes // self._stride, layout.num_blocks * layout.num_layers)
        if self._slots < 1:
            raise ConfigError(
                f"a block has {self._stride} bytes in a layer, and the mirror of the device's pool "
                f"for one receiver {nbytes} bytes: raise network.staging_mib"
            )
        self.largest = max(1, self._slots // 2)  # so that one is copied while another is put
        region = pool.copies.lock(register(self._slots * self._stride))
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        self._memory_sb = memory.view(self._slots, self._stride)
        offsets = np.arange(self._slots, dtype=np.int64) * self._stride
        self._slices = [
            Slices(region, offsets, layout.layer_block_bytes(i)) for i in range(layout.num_layers)
        ]
        self._next, self._free = 0, self._slots
        self._used: deque[tuple[int, Ticket | None]] = deque()
        """Slots in the order in which they were taken, and the put that reads them."""
        self._closed = False
        self._changed = threading.Condition()

    def slices(self, layer: int) -> Slices:
        return self._slices[layer]

    @contextlib.contextmanager
    def hold(self, layer: int, blocks: Rows, ready: Moment) -> Iterator[Held]:
        slots = self._reserve(len(blocks))
        held = Held(slots, NOW)
        try:
            rows = self._pool.rows(layer)
            targets = self._parts(slots, rows.shape[1])
            self._pool.copies.fetch(targets, rows, blocks, ready).wait()
            yield held
        finally:
            self._used.append((len(slots), held.ticket))

    def _parts(self, slots: Rows, length: int) -> list[torch.Tensor]:
        """The slots' memory, as one part or two."""
        first, count = int(slots[0]), min(len(slots), self._slots - int(slots[0]))
        parts = [self._memory_sb[first : first + count, :length]]
        if count < len(slots):
            parts.append(self._memory_sb[: len(slots) - count, :length])
        return parts

    def _reserve(self, count: int) -> Rows:
        assert 0 < count <= self._slots
        with self._changed:
            if not self._changed.wait_for(lambda: self._room(count), DEFAULT_TIMEOUT):
                raise DeadlineError(f"puts from the mirror did not end in {DEFAULT_TIMEOUT:g} s")
            if self._closed:
                raise TransportError("the node is closing")
        slots = (self._next + np.arange(count, dtype=np.int32)) % self._slots
        self._next = (self._next + count) % self._slots
        self._free -= count
        return slots.astype(np.int32)

    def _room(self, count: int) -> bool:
        while self._used and (self._used[0][1] is None or self._used[0][1].done):
            self._free += self._used.popleft()[0]
        return self._closed or self._free >= count

    def look(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
