"""A KV pool in the canonical layout as torch views: what backends on the host share.

It owns the memory (or a view of the caller's) and knows where blocks lie. It does not attend.

Shapes: t tokens, n KV heads, d the key size, e the value size, l tokens of a row.
"""

from __future__ import annotations

import math

import torch

from ..core.errors import ConfigError
from ..kvcache.layout import DTYPE_BYTES, SCALE_BYTES, KVSpec, PoolLayout, blocks_for
from ..transport.base import DeviceMemory
from .base import Capabilities

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Of queries, keys, values and results."""
STORED = (*DTYPES, "int8")
"""What a pool on the host holds."""
ALIGNMENT = 64
"""Bytes; a cache line, and the widest vector."""


class Pool:
    """Layers of blocks in one flat uint8 tensor. Without ``buffer`` the memory is its own."""

    def __init__(self, layout: PoolLayout, buffer: memoryview | DeviceMemory | None = None) -> None:
        self.layout = layout
        self.bytes = _own(layout.total_bytes) if buffer is None else _view(buffer, layout)
        self._layers = [self._layer_views(i) for i in range(layout.num_layers)]
        self._scales = [self._scale_views(i) for i in range(layout.num_layers)]

    def _layer_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        spec, size = self.layout.specs[layer], self.layout.block_size
        flat = self._layer_bytes(layer)[:, : self._scales_at(spec)]
        flat = flat.view(DTYPES.get(spec.dtype, torch.int8))
        split = spec.kv_heads * spec.k_dim * size
        blocks = self.layout.num_blocks
        keys = flat[:, :split].view(blocks, spec.kv_heads, size, spec.k_dim)
        values = flat[:, split:].view(blocks, spec.kv_heads, size, spec.v_dim)
        return keys, values

    def _scales_at(self, spec: KVSpec) -> int:
        """Where in a block its numbers end."""
        return (
            spec.kv_heads
            * (spec.k_dim + spec.v_dim)
            * self.layout.block_size
            * DTYPE_BYTES[spec.dtype]
        )

    def _scale_views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Of keys and of values, ``[b, n, size]``; None where the type has none."""
        spec = self.layout.specs[layer]
        if spec.dtype not in SCALE_BYTES:
            return None
        flat = self._layer_bytes(layer)[:, self._scales_at(spec) :].view(torch.float32)
        pair = flat.view(len(flat), 2, spec.kv_heads, self.layout.block_size)
        return pair[:, 0], pair[:, 1]

    def _layer_bytes(self, layer: int) -> torch.Tensor:
        nbytes = self.layout.layer_block_bytes(layer)
        start = self.layout.layer_offsets[layer]
        part = self.bytes[start : start + nbytes * self.layout.num_blocks]
        return part.view(self.layout.num_blocks, nbytes)

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        """Stores tokens of any of ``DTYPES``; ``ValueError`` where a slot is outside the pool."""
        size = self.layout.block_size
        _check_range("slot", slots_t, size * self.layout.num_blocks)
        blocks, offsets = slots_t // size, slots_t % size
        for i, numbers in enumerate((k_tnd, v_tne)):
            place, scales = self._layers[layer][i], self._scales[layer]
            if scales is None:
                place[blocks, :, offsets] = numbers.to(place.dtype)
            else:
                place[blocks, :, offsets], scales[i][blocks, :, offsets] = quantise(numbers)

    def gather(
        self, layer: int, table_b: torch.Tensor, start: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys ``[n, l, d]`` and values ``[n, l, e]`` of positions ``start`` to ``length - 1``, in
        the stored type; int8 as float32."""
        size = self.layout.block_size
        first = start // size
        blocks = table_b[first : blocks_for(length, size)]
        _check_range("block", blocks, self.layout.num_blocks)
        skip = slice(start - first * size, length - first * size)
        scales = self._scales[layer]
        keys, values = (
            numbers[blocks] if scales is None else numbers[blocks] * scales[i][blocks][..., None]
            for i, numbers in enumerate(self._layers[layer])
        )
        return (
            keys.transpose(0, 1).flatten(1, 2)[:, skip],
            values.transpose(0, 1).flatten(1, 2)[:, skip],
        )

    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        index = self._index(blocks)
        parts = [self._layer_bytes(i)[index].flatten() for i in range(self.layout.num_layers)]
        return torch.cat(parts)

    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        check_import(self.layout, blocks, data)
        index, at = self._index(blocks), 0
        for layer in range(self.layout.num_layers):
            nbytes = self.layout.layer_block_bytes(layer)
            end = at + nbytes * len(blocks)
            self._layer_bytes(layer)[index] = data[at:end].view(len(blocks), nbytes)
            at = end

    def _index(self, blocks: list[int]) -> torch.Tensor:
        index = torch.tensor(blocks, dtype=torch.int64)
        _check_range("block", index, self.layout.num_blocks)
        return index


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x`` as int8 and, for each last dimension, float32 scales: 127 steps to its largest size."""
    x = x.float()
    most = x.abs().amax(-1)
    steps = torch.where(most > 0, 127 / most, 0)
    numbers = (x.double() * steps.double()[..., None]).round()  # rounded once
    return numbers.to(torch.int8), most / 127


def _own(nbytes: int) -> torch.Tensor:
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8)
    skip = -memory.data_ptr() % ALIGNMENT
    return memory[skip : skip + nbytes]


def _view(buffer: memoryview | DeviceMemory, layout: PoolLayout) -> torch.Tensor:
    if isinstance(buffer, DeviceMemory):
        raise ConfigError("buffer must be memory of the host for this backend, not of a device")
    if buffer.readonly:
        raise ConfigError("buffer must be writable, not read-only")
    if buffer.nbytes < layout.total_bytes:
        raise ConfigError(
            f"buffer must hold at least {layout.total_bytes} bytes, not {buffer.nbytes}"
        )
    memory = torch.frombuffer(buffer, dtype=torch.uint8)[: layout.total_bytes]
    if memory.data_ptr() % ALIGNMENT:
        raise ConfigError(f"buffer must be aligned to {ALIGNMENT} bytes; align it to pages")
    return memory


def _check_range(what: str, values: torch.Tensor, end: int) -> None:
    if values.numel() and (int(values.min()) < 0 or int(values.max()) >= end):
        raise ValueError(
            f"{what}s must be from 0 to {end - 1}, not {int(values.min())} to {int(values.max())}"
        )


def check_blocks(layout: PoolLayout, blocks: list[int]) -> None:
    """``ValueError`` where a block is outside the pool."""
    _check_range("block", torch.tensor(blocks, dtype=torch.int64), layout.num_blocks)


def check_import(layout: PoolLayout, blocks: list[int], data: torch.Tensor) -> None:
    """``ValueError`` unless ``data`` is what ``export_blocks`` makes of so many blocks."""
    nbytes = layout.block_bytes * len(blocks)
    if data.dtype != torch.uint8 or data.shape != (nbytes,):
        raise ValueError(
            f"{len(blocks)} blocks are {nbytes} bytes of uint8, "
            f"not {tuple(data.shape)} of {data.dtype}"
        )


def check_layout(capabilities: Capabilities, layout: PoolLayout, num_heads: int) -> None:
    """``ConfigError`` naming the field for whatever the backend cannot serve."""
    for field in ("block_size", "num_blocks"):
        _require(
            f"layout.{field}", getattr(layout, field), getattr(layout, field) >= 1, "at least 1"
        )
    _require("layout.specs", layout.specs, bool(layout.specs), "at least one layer")
    for layer, spec in enumerate(layout.specs):
        _check_spec(capabilities, spec, f"specs[{layer}]", num_heads)


def _check_spec(capabilities: Capabilities, spec: KVSpec, where: str, num_heads: int) -> None:
    for field in ("kv_heads", "k_dim", "v_dim"):
        value = getattr(spec, field)
        _require(f"{where}.{field}", value, value >= 1, "at least 1")
    good = num_heads >= 1 and num_heads % spec.kv_heads == 0
    _require("num_heads", num_heads, good, f"a multiple of {where}.kv_heads = {spec.kv_heads}")
    for field in ("k_dim", "v_dim") if spec.dtype in SCALE_BYTES else ():
        value = getattr(spec, field)  # scales lie behind the numbers
        _require(f"{where}.{field}", value, value % 4 == 0, f"a multiple of 4 for {spec.dtype}")
    known = f"one of {', '.join(capabilities.dtypes)} for the {capabilities.name} backend"
    _require(f"{where}.dtype", spec.dtype, spec.dtype in capabilities.dtypes, known)
    _require(f"{where}.scale", spec.scale, math.isfinite(spec.scale), "finite")
    good = spec.window is None or spec.window >= 1
    _require(f"{where}.window", spec.window, good, "at least 1, or None")
    good = spec.softcap is None or (math.isfinite(spec.softcap) and spec.softcap > 0)
    _require(f"{where}.softcap", spec.softcap, good, "finite and above 0, or None")
    for field, feature in FEATURES.items():
        value = getattr(spec, field)
        allowed = value is None or feature in capabilities.features
        _require(f"{where}.{field}", value, allowed, f"None for the {capabilities.name} backend")
    for field in ("sinks", "alibi_slopes"):
        value = getattr(spec, field)
        good = value is None or len(value) == num_heads
        _require(f"{where}.{field}", value, good, f"one number for each of {num_heads} query heads")


FEATURES = {
    "window": "window",
    "softcap": "softcap",
    "sinks": "sinks",
    "alibi_slopes": "alibi",
}
"""Fields of ``KVSpec`` and the feature that a backend must have to serve them."""
ALL_FEATURES = frozenset(FEATURES.values())


def _require(name: str, value: object, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{name} must be {allowed}, not {value!r}")


def check_tokens(
    name: str, x: torch.Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """``ValueError`` unless ``x`` is of that type and shape, contiguous within a token."""
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, not {x.dtype} {list(x.shape)}")
    _, heads, size = shape
    strides = x.stride()
    if (strides[2] != 1 and size > 1) or (strides[1] != size and heads > 1):
        raise ValueError(f"{name} must be contiguous within a token; its strides are {strides}")


def check_floats(name: str, x: torch.Tensor, shape: tuple[int, int, int]) -> None:
    """``check_tokens`` for any of ``DTYPES``."""
    if x.dtype not in DTYPES.values():
        raise ValueError(f"{name} must be of {', '.join(DTYPES)}, not {x.dtype}")
    check_tokens(name, x, shape, x.dtype)
