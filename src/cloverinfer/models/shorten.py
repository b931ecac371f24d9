"""Norms and rotary positions that a model wrote out, as one operator each.

It owns these patterns of PyTorch's operators; products are ``fuse.py``'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Rotations = dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]]
"""What each rotation's result is made of: rows, cos, sin."""


def only_user(node: fx.Node, target: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def fuse_norms(graph: fx.Graph, bare: bool = True) -> None:
    """``x / sqrt(mean(x^2) + eps)`` as one operator; with the weight, where all is of one type.
    ``bare``: also where it is not."""
    for root in [node for node in graph.nodes if node.target is aten.rsqrt.default]:
        found = _norm_of(root)
        if found is not None:
            _replace_norm(graph, *found, bare)


def _norm_of(root: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The norm's result before its weight, what it is of, and epsilon."""
    result = only_user(root, aten.mul.Tensor)
    mean, eps = _operands(root.args[0], aten.add.Tensor)
    square, *how = _operands(mean, aten.mean.dim)
    x, exponent = _operands(square, aten.pow.Tensor_Scalar)
    if result is None or not isinstance(x, fx.Node) or not isinstance(eps, float):
        return None
    if exponent != 2 or how != [[-1], True] or set(result.args) != {x, root}:
        return None
    inner = [root.args[0], mean, square]
    return (result, x, eps) if all(len(node.users) == 1 for node in inner) else None  # type: ignore[union-attr]


def _operands(node: Any, target: Any) -> tuple[Any, ...]:
    if isinstance(node, fx.Node) and node.target is target and not node.kwargs:
        return tuple(node.args)
    return (None, None)


def _replace_norm(graph: fx.Graph, result: fx.Node, x: fx.Node, eps: float, bare: bool) -> None:
    size = x.meta["val"].shape[-1]
    narrow = only_user(result, aten._to_copy.default)
    scaled = None if narrow is None else only_user(narrow, aten.mul.Tensor)
    wide = x.args[0] if x.target is aten._to_copy.default else None
    weight: Any = None
    if scaled is not None and isinstance(wide, fx.Node):
        weight = next((arg for arg in scaled.args if arg is not narrow), None)
        dtype = wide.meta["val"].dtype
        fits = isinstance(weight, fx.Node) and weight.meta["val"].shape == (size,)
        same = fits and weight.meta["val"].dtype == dtype == scaled.meta["val"].dtype
        if same:
            assert scaled is not None
            _emit_norm(graph, scaled, (wide, [size], weight, eps))
            return
    if bare:
        _emit_norm(graph, result, (x, [size], None, eps))


def _emit_norm(graph: fx.Graph, instead: fx.Node, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(instead):
        made = graph.call_function(aten.rms_norm.default, args)
    made.meta["val"] = instead.meta["val"]
    instead.replace_all_uses_with(made)


def fuse_rotations(graph: fx.Graph) -> None:
    """``x * cos + cat(-second half, first half) * sin`` without the turned copy."""
    for total, given in find_rotations(graph).items():
        with graph.inserting_before(total):
            made = graph.call_function(rotate, given)
        made.meta["val"] = total.meta["val"]
        total.replace_all_uses_with(made)


def find_rotations(graph: fx.Graph) -> Rotations:
    found: Rotations = {}
    for total in [node for node in graph.nodes if node.target is aten.add.Tensor]:
        for one, other in (total.args[:2], total.args[1::-1]):
            x, cos = _operands(one, aten.mul.Tensor)
            turned, sin = _operands(other, aten.mul.Tensor)
            if x is not None and _is_turned(turned, x) and not total.kwargs:
                found[total] = x, cos, sin
                break
    return found


def _is_turned(turned: Any, x: Any) -> bool:
    parts, *dim = _operands(turned, aten.cat.default)
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or dim != [-1]:
        return False
    second = parts[0].args[0] if parts[0].target is aten.neg.default else None
    last, size = x.meta["val"].ndim - 1, x.meta["val"].shape[-1]
    slices = [_operands(part, aten.slice.Tensor) for part in (second, parts[1])]
    if any(len(one) != 4 or one[0] is not x or one[1] not in (last, -1) for one in slices):
        return False
    half = size // 2
    return size % 2 == 0 and slices[0][2:][0] == half and slices[1][2:] == (0, half)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions of ``x`` ``[..., d]`` whose halves are turned against each other."""
    half, out = x.shape[-1] // 2, x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out
