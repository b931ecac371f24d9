"""The null backend: computes nothing, remembers every call; for tests and measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch

from ..kvcache.layout import PoolLayout
from ..transport.base import DeviceMemory
from .base import AttentionBackend, Capabilities
from .pool import ALL_FEATURES, STORED, check_import, check_layout


@dataclass(frozen=True)
class AppendCall:
    layer: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class AttendCall:
    layer: int
    query_starts: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class ExportCall:
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class ImportCall:
    blocks: tuple[int, ...]
    nbytes: int


Call = Union[AppendCall, AttendCall, ExportCall, ImportCall]


class NullAttention(AttentionBackend):
    """Results are zeros. Has no memory: a given buffer is left alone. ``threads`` is not used."""

    capabilities = Capabilities(
        name="null",
        device="cpu",
        dtypes=STORED,
        direct_puts=True,
        computes=False,
        features=ALL_FEATURES,
        converts=True,
    )

    def __init__(self, threads: int = 1) -> None:
        self.calls: list[Call] = []
        self._layout: PoolLayout | None = None
        self._heads = 0

    def allocate(
        self, layout: PoolLayout, num_heads: int, buffer: memoryview | DeviceMemory | None = None
    ) -> None:
        check_layout(self.capabilities, layout, num_heads)
        self._layout = layout
        self._heads = num_heads

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        self.calls.append(AppendCall(layer, tuple(slots_t.tolist())))

    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tables = tuple(tuple(row) for row in block_tables_rb.tolist())
        starts, lengths = tuple(query_starts.tolist()), tuple(lengths_r.tolist())
        self.calls.append(AttendCall(layer, starts, tables, lengths))
        shape = (q_thd.shape[0], self._heads)
        return q_thd.new_zeros((*shape, self._open().specs[layer].v_dim)), torch.zeros(shape)

    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        self.calls.append(ExportCall(tuple(blocks)))
        return torch.zeros(self._open().block_bytes * len(blocks), dtype=torch.uint8)

    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        check_import(self._open(), blocks, data)
        self.calls.append(ImportCall(tuple(blocks), data.numel()))

    def close(self) -> None:
        self._layout = None

    def _open(self) -> PoolLayout:
        assert self._layout is not None, "allocate comes first, and nothing after close"
        return self._layout
