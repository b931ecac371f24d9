"""The reference backend: plain torch, row by row, every feature; right before it is fast."""

from __future__ import annotations

import torch

from ..kvcache.layout import PoolLayout
from ..transport.base import DeviceMemory
from .base import AttentionBackend, Capabilities
from .pool import ALL_FEATURES, STORED, Pool, check_floats, check_layout
from .rows import attend_plain, first_visible


class TorchAttention(AttentionBackend):
    """``threads`` is not used: torch's operations run on as many as ``torch.set_num_threads``
    says, which is for the process to decide.
    """

    capabilities = Capabilities(
        name="torch",
        device="cpu",
        dtypes=STORED,
        direct_puts=True,
        features=ALL_FEATURES,
        converts=True,
    )

    def __init__(self, threads: int = 1) -> None:
        self._pool: Pool | None = None
        self._heads = 0

    def allocate(
        self, layout: PoolLayout, num_heads: int, buffer: memoryview | DeviceMemory | None = None
    ) -> None:
        check_layout(self.capabilities, layout, num_heads)
        self._pool = Pool(layout, buffer)
        self._heads = num_heads

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        pool = self._open_pool()
        spec, tokens = pool.layout.specs[layer], slots_t.shape[0]
        check_floats("k", k_tnd, (tokens, spec.kv_heads, spec.k_dim))
        check_floats("v", v_tne, (tokens, spec.kv_heads, spec.v_dim))
        pool.append(layer, k_tnd, v_tne, slots_t)

    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        pool = self._open_pool()
        spec, tokens = pool.layout.specs[layer], q_thd.shape[0]
        check_floats("q", q_thd, (tokens, self._heads, spec.k_dim))
        o_the = q_thd.new_empty((tokens, self._heads, spec.v_dim))
        lse_th = torch.empty((tokens, self._heads))
        starts = query_starts.tolist()
        for row, length in enumerate(lengths_r.tolist()):
            at = slice(starts[row], starts[row + 1])
            first = first_visible(spec, at.stop - at.start, length)
            k_nld, v_nle = pool.gather(layer, block_tables_rb[row], first, length)
            o_the[at], lse_th[at] = attend_plain(spec, q_thd[at], k_nld, v_nle)
        return o_the, lse_th

    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        return self._open_pool().export_blocks(blocks)

    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        self._open_pool().import_blocks(blocks, data)

    def close(self) -> None:
        self._pool = None

    def _open_pool(self) -> Pool:
        assert self._pool is not None, "allocate comes first, and nothing after close"
        return self._pool
