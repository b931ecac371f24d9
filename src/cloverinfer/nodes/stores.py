"""How pools take blocks and tokens from a ring: by the host's copies, by the device's, or through
the backend that alone knows its pool's layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..attention.base import AttentionBackend
from ..kvcache.convert import Array, PoolWriter, convert
from ..kvcache.layout import DTYPE_BYTES, SCALE_BYTES, KVSpec, PoolLayout
from .copies import NOW, Copies, Moment
from .pool import Pool
from .staging import Store

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Numbers are moved as they are, by their size in bytes."""


class HostStore(Store):
    """A pool in host memory in the canonical layout."""

    def __init__(self, layout: PoolLayout, memory: memoryview) -> None:
        self._writer = PoolWriter(layout, memory)

    def tokens(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> Moment:
        self._writer.store(layer, k_tnd, v_tne, slots_t, first_head)
        return NOW


class DeviceStore(Store):
    """A pool on a device in the canonical layout. What is computed from then on comes after."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._copies = pool.copies

    def blocks(
        self, layer: int, slots_bs: npt.NDArray[np.uint8], slots: list[int], blocks: list[int]
    ) -> Moment | None:
        rows = self._pool.rows(layer)
        memory = torch.from_numpy(slots_bs)[:, : rows.shape[1]]
        sources = [memory[first:end] for first, end in runs(slots)]
        stored = self._copies.store(rows, np.array(blocks, np.int32), sources)
        self._copies.follow(stored)
        return stored

    def tokens(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> Moment:
        spec, size = self._pool.layout.specs[layer], self._pool.layout.block_size
        assert spec.dtype not in SCALE_BYTES, "no device stores scales in its blocks"
        heads = slice(first_head, first_head + k_tnd.shape[1])
        moved = [torch.from_numpy(np.ascontiguousarray(x)) for x in (k_tnd, v_tne)]
        blocks_t, offsets_t = (torch.from_numpy(x) for x in np.divmod(slots_t, size))
        views = _views(self._pool.rows(layer), spec, size)
        stored = self._copies.scatter(
            [view[:, heads] for view in views],
            [x.view(view.dtype) for x, view in zip(moved, views, strict=True)],
            (blocks_t, offsets_t),
        )
        self._copies.follow(stored)
        return stored


class BackendStore(Store):
    """Tokens appended by the backend."""

    def __init__(self, backend: AttentionBackend, layout: PoolLayout, copies: Copies) -> None:
        self._backend = backend
        self._layout = layout
        self._copies = copies

    def tokens(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> Moment:
        assert first_head == 0, "heads were checked at the meeting"
        stored = self._layout.specs[layer].dtype
        if stored in SCALE_BYTES:  # backends take floats
            k_tnd, v_tne = (convert(x, stored, "float32") for x in (k_tnd, v_tne))
            stored = "float32"
        dtype = getattr(torch, stored)
        k, v = (
            torch.from_numpy(np.ascontiguousarray(x)).view(dtype).to(self._copies.torch)
            for x in (k_tnd, v_tne)
        )
        self._backend.append(layer, k, v, torch.from_numpy(slots_t).to(self._copies.torch))
        return self._copies.mark()


def store_of(pool: Pool, backend: AttentionBackend) -> Store:
    if not backend.capabilities.direct_puts:
        return BackendStore(backend, pool.layout, pool.copies)
    return DeviceStore(pool) if pool.copies.apart else HostStore(pool.layout, pool.host)


def runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """First and end of stretches of slots that adjoin."""
    found: list[tuple[int, int]] = []
    for slot in slots:
        if found and found[-1][1] == slot:
            found[-1] = found[-1][0], slot + 1
        else:
            found.append((slot, slot + 1))
    return found


def _views(rows: torch.Tensor, spec: KVSpec, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys ``[b, n, size, d]`` and values ``[b, n, size, e]`` of a layer's blocks, as bits."""
    item = DTYPE_BYTES[spec.dtype]
    split = spec.kv_heads * size * spec.k_dim * item
    keys, values = rows[:, :split].view(_BITS[item]), rows[:, split:].view(_BITS[item])
    shape = (spec.kv_heads, size)
    return keys.unflatten(1, (*shape, spec.k_dim)), values.unflatten(1, (*shape, spec.v_dim))
