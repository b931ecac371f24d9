"""What attending over prompts by a library of the user's needs, whichever it is.

The library reads our pool as it is: a block is keys ``[n, block_size, d]`` and then values, of
which its layout is a view. Rows of a few query tokens stay with our kernels, and so do layers that
no library serves: float32 and float8, ALiBi, and values of another size than keys.

Shapes: t tokens, h query heads, e the value size.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ...core.errors import ConfigError
from ...kvcache.layout import KVSpec
from ..rows import merge_sinks
from .base import DeviceRows, PromptAttention, PromptPool, Span

LONG = 64
"""Query tokens of a row that a library is worth calling for: half of a tile of theirs."""


class LibraryPrompts(PromptAttention):
    """Takes all rows from the first long one to the last in one call, those between them too."""

    least = LONG
    sizes: tuple[int, ...]
    """Of heads."""

    def __init__(self, pool: PromptPool) -> None:
        self._pool = pool

    def serves(self, spec: KVSpec) -> bool:
        plain = spec.alibi_slopes is None and spec.dtype in ("bfloat16", "float16")
        return plain and spec.k_dim == spec.v_dim and spec.k_dim in self.sizes

    def spans(self, starts: Sequence[int], lengths: Sequence[int]) -> list[Span]:
        counts = [starts[row + 1] - starts[row] for row in range(len(lengths))]
        long = [row for row, count in enumerate(counts) if count >= LONG]
        if not long:
            return []
        first, end = long[0], long[-1] + 1
        return [Span(first, starts[first], tuple(counts[first:end]), tuple(lengths[first:end]))]

    def attend(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o_the, lse_th = self._call(layer, span, q_thd, rows)
        return merge_sinks(self._pool.layout.specs[layer], o_the, lse_th)

    @abstractmethod
    def _call(
        self, layer: int, span: Span, q_thd: torch.Tensor, rows: DeviceRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``attend`` without sinks."""


def there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def imported(module: str) -> Any:
    """``ConfigError`` where it does not load, as one does that was built for another PyTorch."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError) as problem:
        raise ConfigError(f"cluster.prompt_attention: {module} does not load: {problem}") from None
