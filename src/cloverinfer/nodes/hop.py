"""The buffers of the hop: rows of q, k, v to attention nodes, rows of output back.

A row is one token of one layer. Rows of a wavefront are adjacent, so a hop is one range; q, k and
v of a row are adjacent, so a fused QKV projection may write them in place.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt
import torch

from ..kvcache.layout import KVSpec
from ..models.base import QKV
from ..transport import Region, RegionRef, Slices
from .copies import NOW, Copies, Moment

_TOLD = struct.Struct("=IId")
"""A record of what was done of a step, as native code writes it: notice, layers, seconds."""


class HopShape:
    """Elements of a row, there and back; the widest layer decides the stride."""

    def __init__(self, specs: tuple[KVSpec, ...], num_heads: int, dtype: torch.dtype) -> None:
        self.specs = specs
        self.num_heads = num_heads
        self.dtype = dtype
        self.there = max(num_heads * s.k_dim + s.kv_heads * (s.k_dim + s.v_dim) for s in specs)
        self.back = max(num_heads * s.v_dim for s in specs)
        shapes = [(s.kv_heads, s.k_dim, s.v_dim) for s in specs]
        self.kinds = [shapes.index(shape) for shape in shapes]
        """Per layer: the first layer whose rows look the same."""

    def row_bytes(self, back: bool) -> int:
        return (self.back if back else self.there) * self.dtype.itemsize


class HopRows:
    """A step's rows ``[r, elements]`` of a buffer, seen as each layer's tensors.

    Views are made once per step for all layers that look the same: they cost more than the hop.
    """

    def __init__(self, shape: HopShape, rows: torch.Tensor) -> None:
        self._shape = shape
        self._rows = rows
        self._qkv: dict[int, QKV] = {}
        self._output: dict[int, torch.Tensor] = {}

    def qkv(self, layer: int) -> QKV:
        """q ``[r, h, d]``, k ``[r, n, d]`` and v ``[r, n, e]`` on the way there."""
        kind = self._shape.kinds[layer]
        if kind not in self._qkv:
            self._qkv[kind] = self._split(self._shape.specs[kind])
        return self._qkv[kind]

    def output(self, layer: int) -> torch.Tensor:
        """o ``[r, h, e]`` on the way back."""
        kind = self._shape.kinds[layer]
        if kind not in self._output:
            heads, v_dim = self._shape.num_heads, self._shape.specs[kind].v_dim
            self._output[kind] = self._rows[:, : heads * v_dim].unflatten(1, (heads, v_dim))
        return self._output[kind]

    def _split(self, spec: KVSpec) -> QKV:
        heads, kv_heads, rows = self._shape.num_heads, spec.kv_heads, self._rows
        q_end = heads * spec.k_dim
        k_end = q_end + kv_heads * spec.k_dim
        v_end = k_end + kv_heads * spec.v_dim
        return (
            rows[:, :q_end].unflatten(1, (heads, spec.k_dim)),
            rows[:, q_end:k_end].unflatten(1, (kv_heads, spec.k_dim)),
            rows[:, k_end:v_end].unflatten(1, (kv_heads, spec.v_dim)),
        )


class HopBuffer:
    """A region as ``[peers][lanes][max_rows]`` rows; one peer where it is a local source. Behind
    the rows it has a record for each peer and lane, ``[peers][lanes]``, which only a dense node's
    buffer of output makes use of: what the peer did for the lane's last step, where it answered all
    layers without Python.
    """

    def __init__(self, shape: HopShape, back: bool, peers: int, lanes: int, max_rows: int) -> None:
        self.shape = shape
        self.lanes = lanes
        self.max_rows = max_rows
        self.row_bytes = shape.row_bytes(back)
        self._rows_bytes = max(1, peers) * lanes * max_rows * self.row_bytes
        self._told_at = -(-self._rows_bytes // _TOLD.size) * _TOLD.size
        self.nbytes = self._told_at + max(1, peers) * lanes * _TOLD.size

    def tensor(self, region: Region) -> torch.Tensor:
        """``[peers, lanes, max_rows, elements]`` over the region's memory."""
        flat = torch.frombuffer(region.buffer, dtype=torch.uint8)[: self._rows_bytes].view(
            self.shape.dtype
        )
        return flat.view(-1, self.lanes, self.max_rows, self.row_bytes // self.shape.dtype.itemsize)

    def slices(self, region: Region | RegionRef, peer: int, lane: int) -> Slices:
        """One slice per row of a peer's lane."""
        rows = np.arange(self.max_rows, dtype=np.int64)
        return Slices(region, self._row_at(peer, lane) + rows * self.row_bytes, self.row_bytes)

    def told_after(self, peer: int, lane: int) -> int:
        """Bytes from the lane's first row to its record."""
        at = self._told_at + (peer * self.lanes + lane) * _TOLD.size
        return at - self._row_at(peer, lane)

    def take_told(self, region: Region, peer: int, lane: int) -> tuple[int, int, float]:
        """The record, once: notice of a step's first layer, layers, seconds; zeros where there is
        none."""
        at = self._row_at(peer, lane) + self.told_after(peer, lane)
        notice, layers, seconds = _TOLD.unpack_from(region.buffer, at)
        _TOLD.pack_into(region.buffer, at, 0, 0, 0.0)
        return notice, layers, seconds

    def _row_at(self, peer: int, lane: int) -> int:
        return (peer * self.lanes + lane) * self.max_rows * self.row_bytes


class HopMemory:
    """The rows of a buffer in a region of this node's, and where the node computes on them."""

    def __init__(self, buffer: HopBuffer, region: Region, copies: Copies) -> None:
        self._copies = copies
        self._host = buffer.tensor(copies.lock(region))
        self.rows = self._host
        """``[peers, lanes, max_rows, elements]`` of the node's device."""
        if copies.apart:
            self.rows = torch.zeros_like(self._host, device=copies.torch)

    def bring(self, peer: int, lane: int, count: int) -> None:
        """What has arrived, to where it is computed on. More may arrive once something of what is
        computed from now on is known."""
        if self._copies.apart:
            arrived = self._host[peer, lane, :count]
            self.rows[peer, lane, :count].copy_(arrived, non_blocking=True)

    def send(self, peer: int, lane: int, count: int) -> Moment:
        """What was computed, to the region; it may be put, or computed again, from the moment on
        that this returns."""
        if not self._copies.apart:
            return NOW
        rows = self.rows[peer, lane, :count]
        return self._copies.copy(self._host[peer, lane, :count], rows)


def row_index(local: int, remote: int, count: int) -> npt.NDArray[np.int32]:
    """Index array that puts ``count`` rows from ``local`` on to ``remote`` on."""
    steps = np.arange(count, dtype=np.int32)
    return np.stack([local + steps, remote + steps], axis=1)
