"""An engine's KV cache as regions and grids: what its tensors say of where they lie.

Reads shapes, strides and addresses, of host memory or of one GPU's; the tensors stay the engine's.
Tensors are known by what they answer (``shape``, ``stride``, ``element_size``, ``data_ptr``,
``untyped_storage``, ``device``), so that this needs no PyTorch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

from ...core.errors import ConfigError
from ...transport import DeviceMemory
from .grid import Grid

Memory = Union[memoryview, DeviceMemory]


@dataclass(frozen=True)
class Shape:
    """What the engine says of its cache."""

    num_blocks: int
    block_size: int
    """Tokens in a block as the engine's scheduler counts."""
    heads: int
    """KV heads of this worker."""
    opaque: bool
    """Only the engine's kernels know how tokens lie within a head of a block."""


@dataclass(frozen=True)
class Pool:
    """All of it."""

    buffers: list[Memory]
    """The memory that the tensors lie in, each once; all of one kind."""
    layers: list[str]
    """Names of the layers that have a cache of their own, in the engine's order."""
    grids: list[Grid]
    """One for each of ``layers``. Their blocks may be parts of the scheduler's."""
    split: int
    """Blocks of the grids that one block of the scheduler's is."""
    storages: list[Any]
    """What the tensors lie in, beside ``buffers``."""

    @property
    def device(self) -> int | None:
        """Index of the GPU that it is on; None: it is host memory."""
        first = self.buffers[0]
        return first.device if isinstance(first, DeviceMemory) else None


def pool_of(caches: Mapping[str, Any], shape: Shape) -> Pool:
    """``ConfigError`` for memory that nothing moves and for layouts that are not understood."""
    storages: dict[int, tuple[int, Memory, Any]] = {}
    seen: set[tuple[Any, ...]] = set()
    layers, grids = [], []
    for name, tensor in caches.items():
        _check(name, tensor)
        key = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())
        if key in seen:
            continue  # it reads the cache of an earlier layer
        seen.add(key)
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        if start not in storages:
            memory = _memory(tensor.device, start, storage.nbytes())
            storages[start] = len(storages), memory, storage
        layers.append(name)
        grids.append(_grid(name, tensor, shape, storages[start][0], tensor.data_ptr() - start))
    if not grids:
        raise ConfigError("this engine has no KV cache to hand over")
    places = {str(tensor.device) for tensor in caches.values()}
    if len(places) > 1:
        raise ConfigError(f"layers have caches on {', '.join(sorted(places))}: they must be alike")
    blocks = {grid.blocks for grid in grids}
    if len(blocks) > 1:
        raise ConfigError(f"layers have caches of {sorted(blocks)} blocks: they must be alike")
    split = grids[0].blocks // shape.num_blocks
    buffers, kept = ([each[i] for each in storages.values()] for i in (1, 2))
    return Pool(buffers, layers, grids, split, kept)


def _check(name: str, tensor: Any) -> None:
    if isinstance(tensor, (list, tuple)):
        raise ConfigError(f"layer {name} keeps a state of its own and no KV cache: not supported")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"the KV cache is on {tensor.device}: this connector moves memory of the host and of "
            "CUDA devices only"
        )


def _memory(device: Any, start: int, nbytes: int) -> Memory:
    if device.type == "cuda":
        return DeviceMemory(start, nbytes, device.index)
    return memoryview((ctypes.c_char * nbytes).from_address(start)).cast("B")


def _grid(name: str, tensor: Any, shape: Shape, region: int, offset: int) -> Grid:
    item = tensor.element_size()
    sizes, strides = list(tensor.shape), [stride * item for stride in tensor.stride()]
    axes = _axes(sizes, shape)
    if axes is None or sizes[axes["block"]] % shape.num_blocks or strides[-1] != item:
        raise ConfigError(f"layer {name} has a KV cache of the shape {sizes}: not understood")

    def axis(what: str) -> tuple[int, int]:
        at = axes.get(what)
        return (1, 0) if at is None else (sizes[at], strides[at])

    (blocks, block_stride), (parts, part_stride) = axis("block"), axis("part")
    (heads, head_stride), (tokens, token_stride) = axis("head"), axis("token")
    token_bytes = sizes[-1] * item
    if shape.opaque and token_stride != token_bytes:
        raise ConfigError(f"layer {name}: tokens of a block do not lie together")
    return Grid(
        region=region,
        base=offset,
        blocks=blocks,
        block_stride=block_stride,
        parts=parts,
        part_stride=part_stride,
        heads=heads,
        head_stride=head_stride,
        groups=1 if shape.opaque else tokens,
        group_stride=0 if shape.opaque else token_stride,
        group_tokens=tokens if shape.opaque else 1,
        group_bytes=token_bytes * tokens if shape.opaque else token_bytes,
    )


def _axes(sizes: list[int], shape: Shape) -> dict[str, int] | None:
    """Which axis is what, the last apart, which is a token's head; None where that is not clear.

    Four axes are blocks, heads, tokens; five have keys and values apart, before or after the
    blocks; three have no heads.
    """
    if len(sizes) == 4:
        return {"block": 0, "head": 1, "token": 2}
    if len(sizes) == 3:
        return {"block": 0, "token": 1}
    if len(sizes) != 5 or 2 not in sizes[:2]:
        return None
    part = 1 if sizes[1] == 2 and sizes[0] != 2 else 0
    axes = {"part": part, "block": 1 - part}
    tokens_first = not shape.opaque and sizes[3] == shape.heads
    return axes | ({"token": 2, "head": 3} if tokens_first else {"head": 2, "token": 3})
