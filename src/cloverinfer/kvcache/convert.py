"""Blocks of one pool as blocks of another: other block sizes, number types, some of the heads.

Everything is numpy on the host and moves whole arrays. bfloat16, which numpy lacks, is carried as
the upper 16 bits of a float32. Who sends and when is not known here.

Shapes: b blocks, t tokens, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..core.errors import ConfigError
from .layout import DTYPE_BYTES, KVSpec, PoolLayout

Array = npt.NDArray[np.generic]
_STORED: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
}
_SAME = ("k_dim", "v_dim", "scale", "window", "softcap", "sinks", "alibi_slopes")
"""Fields of a KV spec that no conversion bridges."""


def needs_conversion(sender: PoolLayout, receiver: PoolLayout, first_head: int = 0) -> bool:
    """Whether the sender's blocks must be converted to be the receiver's.

    ``first_head``: which of the receiver's KV heads the sender's first one is. Raises
    ``ConfigError`` naming the field and both values for what cannot be converted.
    """
    if sender.num_layers != receiver.num_layers:
        raise ConfigError(
            f"the sender has {sender.num_layers} layers and the receiver {receiver.num_layers}"
        )
    for layer, (a, b) in enumerate(zip(sender.specs, receiver.specs, strict=True)):
        _check_spec(layer, a, b, first_head)
    return (sender.specs, sender.block_size) != (receiver.specs, receiver.block_size)


def _check_spec(layer: int, sender: KVSpec, receiver: KVSpec, first_head: int) -> None:
    for field in _SAME:
        mine, theirs = getattr(sender, field), getattr(receiver, field)
        if mine != theirs:
            raise ConfigError(f"{field} of layer {layer} is {mine} at the sender and {theirs} here")
    for spec in (sender, receiver):
        if spec.dtype not in _STORED:
            raise ConfigError(f"dtype of layer {layer} is {spec.dtype}: it has no conversion")
    end = first_head + sender.kv_heads
    if first_head < 0 or end > receiver.kv_heads:
        raise ConfigError(
            f"kv_heads of layer {layer} are {first_head} to {end - 1} at the sender and "
            f"{receiver.kv_heads} here"
        )


def covers_heads(ranges: Sequence[tuple[int, int]], kv_heads: int) -> bool:
    """Whether half-open ranges of heads make up all of them, each once."""
    at = 0
    for first, end in sorted(ranges):
        if first != at:
            return False
        at = end
    return at == kv_heads


def convert(values: Array, stored: str, wanted: str) -> Array:
    """Numbers of one stored type as another, rounded to nearest even; the same array where the
    types are the same. What float16 cannot hold becomes infinite."""
    if stored == wanted:
        return values
    exact = _to_float32(values, stored)
    if wanted == "float32":
        return exact
    if wanted == "float16":
        with np.errstate(over="ignore"):
            return exact.astype(np.float16)
    return _to_bfloat16(exact)


def _to_float32(values: Array, stored: str) -> npt.NDArray[np.float32]:
    if stored == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32)


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last kept bit's worth, or a little less where that bit is 0: ties go to even.
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40  # a NaN stays one
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def block_views(memory: npt.NDArray[np.uint8], spec: KVSpec, size: int) -> tuple[Array, Array]:
    """Keys ``[b, n, size, d]`` and values ``[b, n, size, e]`` of ``memory`` ``[b, bytes]``, which
    holds a canonical block of one layer in the leading bytes of each row. Views, not copies."""
    item = DTYPE_BYTES[spec.dtype]
    split = spec.kv_heads * size * spec.k_dim * item
    end = split + spec.kv_heads * size * spec.v_dim * item
    keys = memory[:, :split].view(_STORED[spec.dtype])
    values = memory[:, split:end].view(_STORED[spec.dtype])
    count = len(memory)
    return (
        keys.reshape(count, spec.kv_heads, size, spec.k_dim),
        values.reshape(count, spec.kv_heads, size, spec.v_dim),
    )


def gather_tokens(blocks_bnsd: Array, skip: int, count: int) -> Array:
    """``[t, n, d]``: tokens ``skip`` to ``skip + count - 1`` of consecutive blocks."""
    tokens = blocks_bnsd.swapaxes(1, 2)
    return tokens.reshape(-1, *tokens.shape[2:])[skip : skip + count]


class PoolWriter:
    """Stores tokens of any type and of some heads in a pool in the canonical layout."""

    def __init__(self, layout: PoolLayout, pool: memoryview) -> None:
        self._layout = layout
        memory = np.frombuffer(pool, np.uint8)
        self._layers = [self._views(memory, layer) for layer in range(layout.num_layers)]

    def _views(self, memory: npt.NDArray[np.uint8], layer: int) -> tuple[Array, Array]:
        nbytes, start = self._layout.layer_block_bytes(layer), self._layout.layer_offsets[layer]
        part = memory[start : start + nbytes * self._layout.num_blocks]
        rows = part.reshape(self._layout.num_blocks, nbytes)
        return block_views(rows, self._layout.specs[layer], self._layout.block_size)

    def store(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> None:
        """Token i goes to slot ``slots_t[i]`` (``block * block_size + offset``), its heads to those
        from ``first_head`` on; in the pool's type already."""
        blocks, offsets = np.divmod(slots_t, self._layout.block_size)
        heads = slice(first_head, first_head + k_tnd.shape[1])
        keys, values = self._layers[layer]
        keys[blocks, heads, offsets] = k_tnd
        values[blocks, heads, offsets] = v_tne
