"""The buffers of the hop: rows of q, k, v to attention nodes, rows of output back.

A row is one token of one layer. Rows of a wavefront are adjacent, so a hop is one range; q, k and
v of a row are adjacent, so a fused QKV projection may write them in place.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ..kvcache.layout import KVSpec
from ..transport import Region, RegionRef, Slices


class HopShape:
    """Elements of a row, there and back; the widest layer decides the stride."""

    def __init__(self, specs: tuple[KVSpec, ...], num_heads: int, dtype: torch.dtype) -> None:
        self.specs = specs
        self.num_heads = num_heads
        self.dtype = dtype
        self.there = max(num_heads * s.k_dim + s.kv_heads * (s.k_dim + s.v_dim) for s in specs)
        self.back = max(num_heads * s.v_dim for s in specs)

    def row_bytes(self, back: bool) -> int:
        return (self.back if back else self.there) * self.dtype.itemsize

    def split(
        self, layer: int, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views of q ``[r, h, d]``, k ``[r, n, d]``, v ``[r, n, e]`` in rows of the way there."""
        spec, count = self.specs[layer], len(rows)
        q_end = self.num_heads * spec.k_dim
        k_end = q_end + spec.kv_heads * spec.k_dim
        v_end = k_end + spec.kv_heads * spec.v_dim
        return (
            rows[:, :q_end].view(count, self.num_heads, spec.k_dim),
            rows[:, q_end:k_end].view(count, spec.kv_heads, spec.k_dim),
            rows[:, k_end:v_end].view(count, spec.kv_heads, spec.v_dim),
        )

    def output(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """View of o ``[r, h, e]`` in rows of the way back."""
        v_dim = self.specs[layer].v_dim
        return rows[:, : self.num_heads * v_dim].view(len(rows), self.num_heads, v_dim)


class HopBuffer:
    """A region as ``[peers][lanes][max_rows]`` rows; one peer where it is a local source."""

    def __init__(self, shape: HopShape, back: bool, peers: int, lanes: int, max_rows: int) -> None:
        self.shape = shape
        self.lanes = lanes
        self.max_rows = max_rows
        self.row_bytes = shape.row_bytes(back)
        self.nbytes = max(1, peers) * lanes * max_rows * self.row_bytes

    def tensor(self, region: Region) -> torch.Tensor:
        """``[peers, lanes, max_rows, elements]`` over the region's memory."""
        flat = torch.frombuffer(region.buffer, dtype=torch.uint8)[: self.nbytes].view(
            self.shape.dtype
        )
        return flat.view(-1, self.lanes, self.max_rows, self.row_bytes // self.shape.dtype.itemsize)

    def slices(self, region: Region | RegionRef, peer: int, lane: int) -> Slices:
        """One slice per row of a peer's lane."""
        first = (peer * self.lanes + lane) * self.max_rows
        rows = first + np.arange(self.max_rows, dtype=np.int64)
        return Slices(region, rows * self.row_bytes, self.row_bytes)


def row_index(local: int, remote: int, count: int) -> npt.NDArray[np.int32]:
    """Index array that puts ``count`` rows from ``local`` on to ``remote`` on."""
    steps = np.arange(count, dtype=np.int32)
    return np.stack([local + steps, remote + steps], axis=1)
