"""Blocks of one pool as blocks of another: other block sizes, number types, some of the heads.

Everything is numpy on the host and moves whole arrays. bfloat16, which numpy lacks, is carried as
the upper 16 bits of a float32. Numbers of int8 are carried with the scale that their token has for
its head: as bytes ``[..., d + 4]``, the float32 last. Who sends and when is not known here.

Shapes: b blocks, t tokens, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..core.errors import ConfigError
from .layout import DTYPE_BYTES, SCALE_BYTES, KVSpec, PoolLayout

Array = npt.NDArray[np.generic]
_STORED: dict[str, type[np.generic]] = {
    "float32": np.float32,
    "bfloat16": np.uint16,
    "float16": np.float16,
    "int8": np.int8,
    "float8_e4m3": np.uint8,
}
_FLOAT8 = "float8_e4m3"
"""Moved as it is: its scales are the layer's, which both sides know."""
_SCALE = SCALE_BYTES["int8"]
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
    for spec, other in ((sender, receiver), (receiver, sender)):
        if spec.dtype == _FLOAT8 and spec != other:
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
    if wanted == "int8":
        return _to_int8(exact)
    if wanted == "float16":
        with np.errstate(over="ignore"):
            return exact.astype(np.float16)
    return _to_bfloat16(exact)


def _to_float32(values: Array, stored: str) -> npt.NDArray[np.float32]:
    if stored == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    if stored == "int8":
        numbers, scales = _unpack(values)
        return numbers * scales
    return values.astype(np.float32)


def _unpack(packed: Array) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """Numbers ``[..., d]`` and scales ``[..., 1]``."""
    scales = np.ascontiguousarray(packed[..., -_SCALE:]).view(np.float32)
    return packed[..., :-_SCALE].view(np.int8), scales


def _pack(numbers: Array, scales: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """``scales`` without the last dimension of ``numbers``."""
    tail = np.ascontiguousarray(scales)[..., None].view(np.uint8)
    return np.concatenate([numbers.view(np.uint8), tail], axis=-1)


def _to_int8(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    most = np.abs(values).max(axis=-1)
    steps = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    exact = values.astype(np.float64) * steps[..., None]  # rounded once
    numbers = np.rint(exact).astype(np.int8)
    return _pack(numbers, most / np.float32(127))


def _to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last kept bit's worth, or a little less where that bit is 0: ties go to even.
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    quiet = bits >> 16 | 0x40  # a NaN stays one
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def block_views(memory: npt.NDArray[np.uint8], spec: KVSpec, size: int) -> tuple[Array, Array]:
    """Keys ``[b, n, size, d]`` and values ``[b, n, size, e]`` of ``memory`` ``[b, bytes]``, which
    holds a canonical block of one layer in the leading bytes of each row. Views, not copies;
    without scales."""
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


def scale_views(
    memory: npt.NDArray[np.uint8], spec: KVSpec, size: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scales of keys and of values, ``[b, n, size]``, for a type that has them."""
    at = spec.kv_heads * size * (spec.k_dim + spec.v_dim) * DTYPE_BYTES[spec.dtype]
    each = spec.kv_heads * size * _SCALE
    keys, values = (
        memory[:, start : start + each].view(np.float32).reshape(len(memory), spec.kv_heads, size)
        for start in (at, at + each)
    )
    return keys, values


def block_parts(memory: npt.NDArray[np.uint8], spec: KVSpec, size: int) -> tuple[Array, Array]:
    """What ``convert`` takes: ``block_views``, or copies with scales where the type has them."""
    keys, values = block_views(memory, spec, size)
    if spec.dtype not in SCALE_BYTES:
        return keys, values
    key_scales, value_scales = scale_views(memory, spec, size)
    return _pack(keys, key_scales), _pack(values, value_scales)


def gather_tokens(blocks_bnsd: Array, skip: int, count: int) -> Array:
    """``[t, n, d]``: tokens ``skip`` to ``skip + count - 1`` of consecutive blocks."""
    tokens = blocks_bnsd.swapaxes(1, 2)
    return tokens.reshape(-1, *tokens.shape[2:])[skip : skip + count]


class PoolWriter:
    """Stores tokens of any type and of some heads in a pool in the canonical layout."""

    def __init__(self, layout: PoolLayout, pool: memoryview) -> None:
        self._layout = layout
        memory = np.frombuffer(pool, np.uint8)
        rows = [self._rows(memory, layer) for layer in range(layout.num_layers)]
        pairs = list(zip(rows, layout.specs, strict=True))
        size = layout.block_size
        self._layers = [block_views(row, spec, size) for row, spec in pairs]
        self._scales = [
            scale_views(row, spec, size) if spec.dtype in SCALE_BYTES else None
            for row, spec in pairs
        ]

    def _rows(self, memory: npt.NDArray[np.uint8], layer: int) -> npt.NDArray[np.uint8]:
        nbytes, start = self._layout.layer_block_bytes(layer), self._layout.layer_offsets[layer]
        part = memory[start : start + nbytes * self._layout.num_blocks]
        return part.reshape(self._layout.num_blocks, nbytes)

    def store(
        self,
        layer: int,
        k_tnd: Array,
        v_tne: Array,
        slots_t: npt.NDArray[np.int64],
        first_head: int,
    ) -> None:
        """Token i goes to slot ``slots_t[i]`` (``block * block_size + offset``), its heads to those
        from ``first_head`` on; in the pool's type already (int8: with their scales)."""
        blocks, offsets = np.divmod(slots_t, self._layout.block_size)
        heads = slice(first_head, first_head + k_tnd.shape[1])
        scales = self._scales[layer]
        for i, tokens in enumerate((k_tnd, v_tne)):
            if scales is None:
                self._layers[layer][i][blocks, heads, offsets] = tokens
                continue
            numbers, of_tokens = _unpack(tokens)
            self._layers[layer][i][blocks, heads, offsets] = numbers
            scales[i][blocks, heads, offsets] = of_tokens[..., 0]
