"""Which operators of a graph a chain computes, and what it needs for them.

It knows nothing of phases, buffers and programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .chain import Act, Map, Step
from .places import Bound, Place
from .shorten import rotate

aten = torch.ops.aten
_UNARY = {
    aten.silu.default: Map.SILU,
    aten.relu.default: Map.RELU,
    aten.sigmoid.default: Map.SIGMOID,
    aten.tanh.default: Map.TANH,
}
_BINARY = {
    aten.add.Tensor: Map.ADD,
    aten.sub.Tensor: Map.SUBTRACT,
    aten.mul.Tensor: Map.MULTIPLY,
}
_SCALAR = {aten.add.Tensor: Map.ADD_SCALAR, aten.mul.Tensor: Map.SCALE}
_POWERS = {2: Map.SQUARE, 3: Map.CUBE}
_NARROWS = (aten._to_copy.default, aten.type_as.default)


@dataclass(frozen=True)
class Found:
    """What computes a node: of the step all but operands and weights."""

    step: Step
    reads: tuple[fx.Node, ...]
    weights: tuple[Place | None, ...] = ()
    parts: int | None = None
    """Of what is put together: the dimension."""


At = Mapping[fx.Node, "Place | Bound"]


def recognise(node: fx.Node, at: At) -> Found | None:
    """``at``: what the graph's first inputs are. The node's value is rows of bfloat16."""
    if node.target is torch.ops.cloverinfer.linear.default:
        return _product(node, at)
    if node.target is aten.rms_norm.default:
        x, size, weight, eps = (*node.args, None, None)[:4]
        return _norm(x, size, (weight, None), eps, at)
    if node.target is aten.layer_norm.default:
        x, size, weight, bias, eps = (*node.args, None, None, 1e-5)[:5]
        return _norm(x, size, (weight, bias), eps, at, centred=True)
    if node.target in _NARROWS:
        return _wide_norm(node, at)
    if node.target is rotate:
        return Found(Step(Act.TURN, ()), _rows(node.args))
    if node.target is aten.cat.default:
        parts, dim = (*node.args, 0)[:2]
        return Found(Step(Act.MAP, ()), _rows(parts), parts=int(dim) % node.meta["val"].ndim)
    return _map(node)


def _rows(nodes: Any) -> tuple[fx.Node, ...]:
    assert all(isinstance(node, fx.Node) for node in nodes)
    return tuple(nodes)


def _map(node: fx.Node) -> Found | None:
    target, args = node.target, node.args
    if target in _UNARY:
        return _applied(_UNARY[target], args[:1])
    if target is aten.gelu.default:
        exact = node.kwargs.get("approximate", "none") == "none"
        return _applied(Map.GELU if exact else Map.GELU_TANH, args[:1])
    if node.kwargs or len(args) != 2:
        return None
    if target is aten.pow.Tensor_Scalar and args[1] in _POWERS:
        return _applied(_POWERS[args[1]], args[:1])  # type: ignore[index]
    if target is aten.div.Tensor and isinstance(args[1], (int, float)) and args[1]:
        return _applied(Map.SCALE, args[:1], 1 / args[1])
    if target in _SCALAR and isinstance(args[1], (int, float)):
        return _applied(_SCALAR[target], args[:1], float(args[1]))
    if target in _BINARY and all(isinstance(arg, fx.Node) for arg in args):
        return _applied(_BINARY[target], args)
    return None


def _applied(map: Map, rows: Any, scalar: float = 0.0) -> Found:
    return Found(Step(Act.MAP, (), map=map, scalar=scalar), _rows(rows))


def _product(node: fx.Node, at: At) -> Found | None:
    x, matrix, bias, residual, outputs, gated = node.args
    place, added = at[matrix], None if bias is None else at[bias]  # type: ignore[index]
    assert isinstance(place, Place)
    assert not isinstance(added, Bound)
    inputs = int(x.meta["val"].shape[-1])  # type: ignore[union-attr]
    if inputs % 2:
        return None
    reads = _rows((x,) if residual is None else (x, residual))
    size = (int(outputs), inputs, 2 if gated else 1)  # type: ignore[call-overload]
    return Found(Step(Act.PRODUCT, (), size=size), reads, (place, added))


def _norm(
    x: Any, size: Any, weights: tuple[Any, Any], eps: Any, at: At, centred: bool = False
) -> Found | None:
    if not isinstance(x, fx.Node) or not isinstance(eps, float) or len(size) != 1:
        return None
    if any(one is not None and constant(one, at) is None for one in weights):
        return None
    given = tuple(None if one is None else constant(one, at) for one in weights)
    return Found(Step(Act.NORM, (), centred=centred, scalar=eps), (x,), given)


def _wide_norm(node: fx.Node, at: At) -> Found | None:
    """A norm in float32 whose weight is applied before it is rounded."""
    source, weight = node.args[0], None
    if not isinstance(source, fx.Node):
        return None
    if source.target is aten.mul.Tensor and len(source.all_input_nodes) == 2:
        norm, other = source.all_input_nodes
        if other.target is aten.rms_norm.default:
            norm, other = other, norm
        source, weight = norm, other
    if source.target is not aten.rms_norm.default:
        return None
    x, size, none, eps = (*source.args, None, None)[:4]
    wide = isinstance(x, fx.Node) and x.target is aten._to_copy.default
    if none is not None or not wide:
        return None
    last = node.meta["val"].shape[-1]
    if weight is not None and weight.meta["val"].shape != (last,):
        return None
    return _norm(x.args[0], size, (weight, None), eps, at)


def constant(node: fx.Node, at: At) -> Place | None:
    """A vector that depends on weights only, to be made in float32 as they are loaded."""
    place = at.get(node)
    if isinstance(place, Place) and not place.folds and not place.experts:
        return Place(place.parts, floats=True)
    graph, env = fx.Graph(), {}
    leaves: list[int] = []
    todo = [node]
    while todo:  # what a node reads comes before it
        one = todo[-1]
        missing = [a for a in one.all_input_nodes if a not in env]
        known = at.get(one)
        if isinstance(known, Place) and not known.folds and len(known.parts) == 1:
            env[one] = graph.placeholder(f"w{len(leaves)}")
            leaves.append(known.parts[0])
        elif one.op != "call_function":
            return None
        elif not missing:
            env[one] = graph.node_copy(one, lambda a: env[a])
        todo = [*todo, *missing] if one not in env else [a for a in todo if a is not one]
    graph.output(env[node])
    return Place(tuple(leaves), floats=True, computed=fx.GraphModule({}, graph))
