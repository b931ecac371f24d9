"""What one token's keys and values look like, and where a block lies in a pool.

The canonical layout, the one that crosses wires: layers follow one another; a layer is
``num_blocks`` blocks; a block of a layer is contiguous, keys ``[kv_heads, block_size, k_dim]``
and then values ``[kv_heads, block_size, v_dim]``, so a block of one layer is one range of a put.
int8 numbers have a scale for each token and KV head: after the values come the keys' scales,
float32 ``[kv_heads, block_size]``, and the values'.
"""

from __future__ import annotations

import math
from functools import cached_property

import msgspec

from ..core.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}
SCALE_BYTES = {"int8": 4}
"""Of types whose scales lie in the blocks; per token, KV head, and of keys and values each."""
CANONICAL_LAYOUT = "canonical-v1"


class KVSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and values of one layer, and how they are attended over."""

    kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str
    """Stored type: float32, bfloat16, float16, int8 (scaled by token and head) or float8_e4m3."""
    scale: float
    """Multiplies q.k before the softmax."""
    window: int | None = None
    """A token sees itself and ``window - 1`` tokens before it; None: all."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: tuple[float, ...] | None = None
    """One extra logit per query head that joins the softmax and carries no value."""
    alibi_slopes: tuple[float, ...] | None = None
    """One slope per query head; adds ``slope * (key position - query position)`` to scores."""
    k_scale: float = 1.0
    """Stored keys times this are the real ones (1 but for float8)."""
    v_scale: float = 1.0
    """The same of values."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of this layer."""
        numbers = (self.k_dim + self.v_dim) * DTYPE_BYTES[self.dtype]
        return self.kv_heads * (numbers + 2 * SCALE_BYTES.get(self.dtype, 0))


class PoolLayout(msgspec.Struct, frozen=True, dict=True):
    """Where every block of every layer lies in a pool of ``total_bytes`` bytes."""

    specs: tuple[KVSpec, ...]
    block_size: int
    """Tokens per block."""
    num_blocks: int

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    def layer_block_bytes(self, layer: int) -> int:
        return self.specs[layer].token_bytes * self.block_size

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer's first block."""
        offsets, at = [], 0
        for layer in range(self.num_layers):
            offsets.append(at)
            at += self.layer_block_bytes(layer) * self.num_blocks
        return tuple(offsets)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return block_bytes(self.specs, self.block_size)

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks


def block_bytes(specs: tuple[KVSpec, ...], block_size: int) -> int:
    """Bytes of one block over all layers."""
    return sum(spec.token_bytes for spec in specs) * block_size


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that ``num_tokens`` tokens fill."""
    return -(-num_tokens // block_size)


def blocks_in_budget(specs: tuple[KVSpec, ...], block_size: int, budget_bytes: float) -> int:
    """Most blocks within ``budget_bytes``; ``ConfigError`` where not even one fits."""
    one = block_bytes(specs, block_size)
    count = math.floor(budget_bytes / one)
    if count < 1:
        raise ConfigError(
            f"the KV budget of {budget_bytes / 2**20:.1f} MiB does not hold one block "
            f"({one / 2**20:.2f} MiB): raise cache.memory_gib or lower cache.block_size"
        )
    return count
