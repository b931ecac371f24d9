"""The largest step that a node may be asked for, run once on its device to see what it takes.

It is a real plan over a small pool of its own, so that it takes the memory of a real step.
"""

from __future__ import annotations

from ..attention import AttentionBackend
from ..kvcache.layout import blocks_for
from ..models.base import DenseHalf
from ..wire.messages import Join, Sampling, StepPlan, StepStats
from .forward import LocalForward, Sampled
from .gate import OpenGate
from .rows import RowTable

_SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=0.95, seed=0)
"""What takes the most room to sample by."""


def lengths_of(max_tokens: int, max_rows: int, max_length: int) -> list[int]:
    """Prompts of the largest step: as many rows as may sample, one as long as possible."""
    rows = min(max_tokens, max_rows)
    lengths, left = [], max_tokens - rows
    for _ in range(rows):
        more = min(left, max_length - 1)
        lengths.append(1 + more)
        left -= more
    return lengths


def blocks_of(lengths: list[int], block_size: int) -> int:
    return sum(blocks_for(length, block_size) for length in lengths)


def run_largest_step(
    half: DenseHalf, backend: AttentionBackend, lengths: list[int], block_size: int
) -> Sampled:
    """One step of fresh prompts of these lengths; ``backend`` has ``blocks_of`` them."""
    rows = RowTable(block_size, local_attention=True)
    plan = _plan(lengths, block_size)
    rows.apply(plan)
    return LocalForward(half, backend, OpenGate(), "python").run(rows.batch(plan), StepStats())


def _plan(lengths: list[int], block_size: int) -> StepPlan:
    joins, at = [], 0
    for request, length in enumerate(lengths):
        count = blocks_for(length, block_size)
        blocks = list(range(at, at + count))
        joins.append(Join(request, 0, [0] * length, 0, blocks, _SAMPLING))
        at += count
    rows = list(range(len(lengths)))
    return StepPlan(0, 0, rows, [0] * len(rows), lengths, [True] * len(rows), joins, [], [])
