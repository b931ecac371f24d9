"""Prompts on a GPU: rows of many query tokens that something else than our kernels attends over.

What stands here is the contract of the ways to do so, and what the host knows of their rows. It
knows no kernels, nor how a step's other rows are attended over.

Shapes: t tokens, r rows, h query heads, n KV heads, d the key size, e the value size, b blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kvcache.layout import KVSpec, PoolLayout
from ..pool import DTYPES

STORED = {**DTYPES, "float8_e4m3": torch.float8_e4m3fn}
"""What a pool on a GPU holds."""


@dataclass(frozen=True)
class Span:
    """Rows that follow each other, and are attended over in one call."""

    row: int
    """The first one."""
    start: int
    """Its first token's index in the step."""
    counts: tuple[int, ...]
    """Query tokens of each row."""
    lengths: tuple[int, ...]
    """Tokens of each row in the cache, those included."""

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + len(self.counts))

    @property
    def tokens(self) -> slice:
        return slice(self.start, self.start + sum(self.counts))


@dataclass(frozen=True)
class Planned:
    """What the host knew of a step before its layers."""

    lengths_r: torch.Tensor
    """The step's, on the device, by which its calls are known."""
    spans: list[Span]
    rest_r: torch.Tensor
    """``lengths_r`` with 0 for the rows of ``spans``."""
    all_rows: bool
    """There are no other rows."""


@dataclass(frozen=True)
class DeviceRows:
    """All rows of a call: what ``AttentionBackend.attend`` is given."""

    query_starts: torch.Tensor
    block_tables_rb: torch.Tensor
    lengths_r: torch.Tensor


KeysValues = Callable[
    [int, Span, torch.dtype, DeviceRows], tuple[torch.Tensor, torch.Tensor, float]
]
"""Of a layer, and fresh prompts of one length: keys ``[p, n, t, d]`` and values ``[p, n, t, e]`` in
order and of that type, and what their products are to be scaled by."""


@dataclass(frozen=True)
class PromptPool:
    """The pool that prompts are in, on a device."""

    layout: PoolLayout
    num_heads: int
    memory: torch.Tensor
    """All of it, uint8."""
    keys_values: KeysValues

    def blocks(self, layer: int) -> torch.Tensor:
        """A view ``[b, 2, n, block_size, d]``, keys and then values, whose sizes are the same."""
        layout, spec = self.layout, self.layout.specs[layer]
        assert spec.k_dim == spec.v_dim
        start = layout.layer_offsets[layer]
        part = self.memory[start : start + layout.layer_block_bytes(layer) * layout.num_blocks]
        shape = (layout.num_blocks, 2, spec.kv_heads, layout.block_size, spec.k_dim)
        return part.view(STORED[spec.dtype]).view(shape)


class PromptAttention(ABC):
    """One way, for one pool. Calls come from one thread, in the order of the device's work, and
    never while a graph is captured."""

    least: int
    """Query tokens that a call needs to hold a row that this may take."""

    @staticmethod
    @abstractmethod
    def missing() -> str:
        """What this needs and is not there, with what to do about it; empty where all is."""

    @abstractmethod
    def __init__(self, pool: PromptPool) -> None:
        """``ConfigError`` where it can do nothing with this pool."""

    @abstractmethod
    def serves(self, spec: KVSpec) -> bool:
        """Layers of this kind; rows of others are left to our kernels."""

    @abstractmethod
    def spans(self, starts: Sequence[int], lengths: Sequence[int]) -> list[Span]:
        """The rows that it takes of a step, which is asked once for each step."""

    @abstractmethod
    def attend(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``o_the`` and ``lse_th`` as ``AttentionBackend.attend`` gives them, of the span's tokens
        ``q_thd``; ``rows`` are all of the step's."""


def plan_spans(
    way: PromptAttention, starts: Sequence[int], lengths: Sequence[int], lengths_r: torch.Tensor
) -> Planned | None:
    """None where ``way`` takes no rows. ``lengths_r``: the same as ``lengths``."""
    spans = way.spans(starts, lengths)
    if not spans:
        return None
    count = sum(len(span.counts) for span in spans)
    rest_r = lengths_r
    if count < len(lengths):
        rest_r = lengths_r.clone()
        for span in spans:
            rest_r[span.rows] = 0
    return Planned(lengths_r, spans, rest_r, count == len(lengths))
