"""Rewrites a stage's graph so that its products are the kernels that native halves use.

Products of the same rows become one, and take along the gate or the addition that follows. It owns
the patterns and the order of a rewritten graph's weights; it knows nothing of folders, and a graph
in which it finds nothing stays as it is.

Shapes: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .linear import make_linear
from .native import native_serves
from .panels import multiply, panels_of, panels_serve

aten = torch.ops.aten


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    outputs: int,
    gated: bool,
) -> torch.Tensor:
    """``[..., o]`` of ``x`` ``[..., i]``: the product, plus what is to be added, or gated."""
    x_ti = x.reshape(-1, x.shape[-1])
    added = None if residual is None else residual.reshape(-1, outputs)
    if weight.dtype == torch.uint8:
        y_to = multiply(x_ti, weight, bias, added, (outputs, 2 if gated else 1))
    else:
        linear = make_linear(weight, bias, packed=False)
        if gated:
            y_to = linear.gated(x_ti)
        else:
            y_to = linear(x_ti) if added is None else linear.add(x_ti, added)
    return y_to.reshape(*x.shape[:-1], outputs)


def _linear_fake(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    outputs: int,
    gated: bool,
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


_LIBRARY = torch.library.Library("cloverinfer", "FRAGMENT")
_LIBRARY.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, int outputs, bool gated)"
    " -> Tensor"
)
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("cloverinfer::linear", _linear_fake, lib=_LIBRARY)


@dataclass(frozen=True)
class Place:
    """What a rewritten graph takes as one weight: some of the artifact's, one below the other."""

    parts: tuple[int, ...]
    """Places in the graph as it was."""
    folds: int = 0
    """Of a matrix for ``cloverinfer::linear``; 0: anything else, as it is."""

    def make(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        whole = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
        if self.folds and panels_serve(whole):
            return panels_of(whole, self.folds)
        return whole


@dataclass(frozen=True)
class Fused:
    """A graph, and what it takes in its first places."""

    graph: fx.GraphModule
    places: tuple[Place, ...]


def kernels_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a rewritten graph does better there. float32 keeps the bits of the graph as it is."""
    if device.type == "cuda":
        return dtype != torch.float32
    return native_serves(dtype, device)


def unchanged(graph: fx.GraphModule, weights: int) -> Fused:
    return Fused(graph, tuple(Place((i,)) for i in range(weights)))


def fuse(module: fx.GraphModule, weights: int, lowering: str) -> Fused:
    """``weights``: how many of the graph's places are weights."""
    pass_ = _Pass(module.graph, weights)
    pass_.run()
    if lowering == "eager":
        _fuse_norms(module.graph)
        _fuse_rotations(module.graph)
        call_directly(module.graph)
    module.graph.eliminate_dead_code()
    places = pass_.places()
    module.graph.lint()
    return Fused(fx.GraphModule(module, module.graph), places)


class _Pass:
    def __init__(self, graph: fx.Graph, weights: int) -> None:
        self._graph = graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self._weights, self._rows = inputs[:weights], inputs[weights]
        self._at = {node: Place((i,)) for i, node in enumerate(self._weights)}

    def run(self) -> None:
        groups: dict[Any, list[fx.Node]] = {}
        for node in self._graph.nodes:
            if self._is_product(node):
                x, weight, *bias = node.args
                key = x, weight.meta["val"].dtype, bool(bias and bias[0])
                groups.setdefault(key, []).append(node)
        for group in groups.values():
            if len(group) == 1:
                self._fuse_one(group[0])
            elif not self._fuse_gate(group):
                self._fuse_many(group)
        for node in list(self._graph.nodes):
            if node.target is aten.view.default:  # of parts of a product, which have strides
                node.target = aten.reshape.default

    def places(self) -> tuple[Place, ...]:
        """In the order of the graph's inputs; those that nothing reads any more are gone."""
        for node in [node for node in self._at if not node.users]:
            self._graph.erase_node(node)
            del self._at[node]
        nodes = [node for node in self._graph.nodes if node in self._at]
        return tuple(self._at[node] for node in nodes)

    def _is_product(self, node: fx.Node) -> bool:
        if node.target is not aten.linear.default or node.kwargs:
            return False
        _, weight, *bias = node.args
        own = weight in self._at and (not bias or bias[0] is None or bias[0] in self._at)
        return own and weight.meta["val"].ndim == 2  # type: ignore[union-attr]

    def _fuse_one(self, node: fx.Node) -> None:
        add = _only_user(node, aten.add.Tensor)
        residual = None
        if add is not None and not add.kwargs and len(add.args) == 2:
            residual = add.args[1] if add.args[0] is node else add.args[0]
        if isinstance(residual, fx.Node) and residual is not node and _alike(residual, node):
            assert add is not None
            self._put(add, [node], residual=residual)
        else:
            self._put(node, [node])

    def _fuse_gate(self, group: list[fx.Node]) -> bool:
        """``silu(first) * second`` of two."""
        for gate in group:
            silu = _only_user(gate, aten.silu.default)
            product = None if silu is None else _only_user(silu, aten.mul.Tensor)
            other = next((node for node in group if node is not gate), None)
            if product is None or len(group) != 2 or other is None or not _alike(gate, other):
                continue
            if set(product.args) == {silu, other} and len(other.users) == 1:
                self._put(product, [gate, other], gated=True)
                return True
        return False

    def _fuse_many(self, group: list[fx.Node]) -> None:
        sizes = [int(node.meta["val"].shape[-1]) for node in group]
        whole = self._put(None, group)
        with self._graph.inserting_after(whole):
            parts = self._graph.call_function(aten.split_with_sizes.default, (whole, sizes, -1))
        for i, node in reversed(list(enumerate(group))):
            with self._graph.inserting_after(parts):
                part = self._graph.call_function(operator.getitem, (parts, i))
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            self._graph.erase_node(node)

    def _put(
        self,
        instead: fx.Node | None,
        products: list[fx.Node],
        residual: fx.Node | None = None,
        gated: bool = False,
    ) -> fx.Node:
        """The operator; ``instead``: of a node, None: before the products."""
        weight = self._input([node.args[1] for node in products], folds=2 if gated else 1)
        biases = [node.args[2] for node in products if len(node.args) > 2 and node.args[2]]
        bias = self._input(biases) if biases else None
        one = products[0].meta["val"].shape[-1]
        outputs = one if gated else sum(int(node.meta["val"].shape[-1]) for node in products)
        with self._graph.inserting_before(instead or products[0]):
            made = self._graph.call_function(
                torch.ops.cloverinfer.linear.default,
                (products[0].args[0], weight, bias, residual, int(outputs), gated),
            )
        if instead is not None:
            made.meta["val"] = instead.meta["val"]
            instead.replace_all_uses_with(made)
            self._graph.erase_node(instead)
        return made

    def _input(self, weights: list[Any], folds: int = 0) -> fx.Node:
        parts = tuple(self._at[node].parts[0] for node in weights)
        name = "m" + "_".join(map(str, parts)) if folds else "b" + "_".join(map(str, parts))
        with self._graph.inserting_before(self._rows):
            node = self._graph.placeholder(name)
        node.meta["val"] = weights[0].meta["val"]
        self._at[node] = Place(parts, folds)
        return node


def _only_user(node: fx.Node, target: Any) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return str(a.shape) == str(b.shape) and a.dtype == b.dtype


def call_directly(graph: fx.Graph) -> None:
    """Calls of our product without PyTorch's dispatcher, which costs as much as a small product."""
    for node in graph.nodes:
        if node.target is torch.ops.cloverinfer.linear.default:
            node.target = _linear


# -- norms


def _fuse_norms(graph: fx.Graph) -> None:
    """``x / sqrt(mean(x^2) + eps)`` as one operator; with the weight, where all is of one type."""
    for root in [node for node in graph.nodes if node.target is aten.rsqrt.default]:
        found = _norm_of(root)
        if found is not None:
            _replace_norm(graph, *found)


def _norm_of(root: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """The norm's result before its weight, what it is of, and epsilon."""
    result = _only_user(root, aten.mul.Tensor)
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


def _replace_norm(graph: fx.Graph, result: fx.Node, x: fx.Node, eps: float) -> None:
    size = x.meta["val"].shape[-1]
    narrow = _only_user(result, aten._to_copy.default)
    scaled = None if narrow is None else _only_user(narrow, aten.mul.Tensor)
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
    _emit_norm(graph, result, (x, [size], None, eps))


def _emit_norm(graph: fx.Graph, instead: fx.Node, args: tuple[Any, ...]) -> None:
    with graph.inserting_before(instead):
        made = graph.call_function(aten.rms_norm.default, args)
    made.meta["val"] = instead.meta["val"]
    instead.replace_all_uses_with(made)


# -- rotations


def _fuse_rotations(graph: fx.Graph) -> None:
    """``x * cos + cat(-second half, first half) * sin`` without the turned copy."""
    for total in [node for node in graph.nodes if node.target is aten.add.Tensor]:
        for one, other in (total.args[:2], total.args[1::-1]):
            x, cos = _operands(one, aten.mul.Tensor)
            turned, sin = _operands(other, aten.mul.Tensor)
            if x is not None and _is_turned(turned, x) and not total.kwargs:
                with graph.inserting_before(total):
                    made = graph.call_function(rotate, (x, cos, sin))
                made.meta["val"] = total.meta["val"]
                total.replace_all_uses_with(made)
                break


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
