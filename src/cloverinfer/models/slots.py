"""Where the values of a chain lie in their buffers, and what views of them are.

A value is followed by a sample of it without memory: two tokens, whose stride no other dimension
has. PyTorch itself says what a view does to the sample. It knows nothing of what is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
TOKENS = 2
"""Of a sample."""
_ROW = 1 << 40
"""Stride of a sample's tokens."""
VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.transpose.int,
        aten.permute.default,
        aten.movedim.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.alias.default,
        aten.expand.default,
    }
)
COPIES = frozenset({aten.clone.default, aten.contiguous.default})
"""What gives the same numbers: values are never written to twice."""


@dataclass(frozen=True)
class Slot:
    """A value: a buffer, and where in a token's row its numbers are."""

    buffer: Hashable
    sample: torch.Tensor

    @property
    def size(self) -> int:
        """Numbers of a token."""
        return self.sample.numel() // TOKENS


def axis_of(sample: torch.Tensor) -> int | None:
    """Which dimension the tokens are."""
    found = [i for i, n in enumerate(sample.stride()) if n == _ROW and sample.shape[i] == TOKENS]
    return found[0] if len(found) == 1 else None


def token_axis(node: fx.Node, symbol: str) -> int | None:
    """Which dimension the tokens are, of a value in bfloat16 where just one depends on them."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dtype != torch.bfloat16:
        return None
    free = [i for i, n in enumerate(val.shape) if not isinstance(n, int)]
    return free[0] if len(free) == 1 and str(val.shape[free[0]]) == symbol else None


def sizes_of(node: fx.Node) -> list[int]:
    return [n if isinstance(n, int) else TOKENS for n in node.meta["val"].shape]


def compact(sizes: Sequence[int], axis: int) -> torch.Tensor:
    """The sample of a value that fills its rows, dimension after dimension."""
    strides, size = [0] * len(sizes), 1
    for i in reversed(range(len(sizes))):
        strides[i] = _ROW if i == axis else size
        size *= 1 if i == axis else sizes[i]
    return torch.empty_strided(tuple(sizes), tuple(strides), dtype=torch.bfloat16, device="meta")


def whole(node: fx.Node, symbol: str) -> torch.Tensor | None:
    """The sample of a value of its own rows, one token's after another's."""
    axis = token_axis(node, symbol)
    if axis is None or any(n != 1 for n in sizes_of(node)[:axis]):
        return None
    return compact(sizes_of(node), axis)


def fills(slot: Slot, width: int) -> bool:
    """Whether a value is all of a row of so many numbers, in order."""
    axis = axis_of(slot.sample)
    assert axis is not None
    same = compact(slot.sample.shape, axis)
    return (
        slot.size == width
        and slot.sample.storage_offset() == 0
        and all(
            a == b or n == 1
            for a, b, n in zip(slot.sample.stride(), same.stride(), slot.sample.shape, strict=True)
        )
    )


def view(sample: torch.Tensor, target: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """``target(sample, *args)`` where that moves nothing, else None."""
    try:
        found = target(sample, *args, **kwargs)
    except RuntimeError:
        return None
    for one in found if isinstance(found, (list, tuple)) else (found,):
        if one.untyped_storage()._cdata != sample.untyped_storage()._cdata:
            return None
    return found


Head = tuple[int, int, int, int]
"""Offset, heads, stride of heads, numbers of a head."""


def heads_of(samples: Sequence[torch.Tensor], keep_last: bool = False) -> list[Head] | None:
    """Samples of one shape as heads of contiguous numbers, the same for all; ``keep_last``: a head
    is the last dimension. None where they are no such thing."""
    axes = {axis_of(one) for one in samples}
    if len(axes) != 1 or None in axes:
        return None
    (axis,) = axes
    shape = samples[0].shape
    kept = [i for i in range(len(shape)) if i != axis and (shape[i] != 1 or i == len(shape) - 1)]
    dims = [(shape[i], tuple(one.stride(i) for one in samples)) for i in kept]
    if not dims or axis == len(shape) - 1:
        return None
    merged = [dims.pop()]
    first_to_merge = 1 if keep_last else 0
    for size, strides in reversed(dims):
        inner, steps = merged[-1]
        if len(merged) > first_to_merge and all(
            outer == step * inner for outer, step in zip(strides, steps, strict=True)
        ):
            merged[-1] = (size * inner, steps)
        else:
            merged.append((size, strides))
    if len(merged) > 2 or any(step != 1 for step in merged[0][1] if merged[0][0] != 1):
        return None
    size = merged[0][0]
    heads, strides = merged[1] if len(merged) == 2 else (1, (size,) * len(samples))
    return [
        (one.storage_offset(), heads, stride, size)
        for one, stride in zip(samples, strides, strict=True)
    ]
