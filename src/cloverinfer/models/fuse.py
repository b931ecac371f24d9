"""Rewrites a stage's graph so that its products are the kernels that native halves use.

Products of the same rows become one, and take along the gate or the addition that follows; on a CPU
they and what stands between them become chains. It owns the patterns of products and the order of a
rewritten graph's weights; it knows nothing of folders, and a graph in which it finds nothing stays
as it is.

Shapes: t tokens, i inputs, o outputs.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from . import operators  # noqa: F401 - it registers what is looked for here
from .chain import Direct
from .chaining import Chaining, call_chains_directly
from .kernel_operators import DIRECT
from .native import native_serves
from .places import Bound, Place
from .shorten import fuse_norms, fuse_rotations, only_user
from .turning import Turn, cut_turn

aten = torch.ops.aten


_LARGE = {
    aten.linear.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.matmul.default,
    torch.ops.cloverinfer.expert_linear.default,
}
"""Operators that are worth all threads also for few tokens."""


@dataclass(frozen=True)
class Fused:
    """A graph, and what it takes in its first places."""

    graph: fx.GraphModule
    places: tuple[Place | Bound, ...]
    direct: Direct | None = None
    """What does all of it without the graph."""
    small: bool = False
    """Whether PyTorch's operators that are left have little to do for a few tokens."""
    turn: Turn | None = None
    """What is left to do once the graph has run."""


def kernels_serve(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a rewritten graph does better there. float32 keeps the bits of the graph as it is."""
    if device.type == "cuda":
        return dtype != torch.float32
    return native_serves(dtype, device)


def turns_serve(device: torch.device) -> bool:
    """Whether norms and rotations are to be kernels of ours there, one launch each."""
    return device.type == "cuda"


def unchanged(graph: fx.GraphModule, weights: int) -> Fused:
    return Fused(graph, tuple(Place((i,)) for i in range(weights)))


def fuse(
    module: fx.GraphModule,
    weights: int,
    lowering: str,
    chained: bool = False,
    halves: frozenset[int] | None = None,
) -> Fused:
    """``weights``: how many of the graph's places are weights; ``chained``: whether chains serve
    where it is to run. ``halves``: where the GPU's kernels do, parts of the carry with equal
    halves."""
    pass_ = _Pass(module.graph, weights)
    pass_.run()
    turn = None
    if chained:
        pass_.pack_experts()
    if halves is not None:
        turn = cut_turn(module.graph, pass_.rows, halves)
        fuse_norms(module.graph, bare=lowering == "eager")
        pass_.take_norms()
    if chained or lowering == "eager":
        fuse_norms(module.graph)
        fuse_rotations(module.graph)
    module.graph.eliminate_dead_code()
    graph, at, direct = module.graph, pass_.at, None
    if chained:
        graph, at, direct = Chaining(graph, at, pass_.rows).run()
    if lowering == "eager":
        call_directly(graph)
        call_chains_directly(graph)
    graph.eliminate_dead_code()
    places = _order(graph, at)
    graph.lint()
    large = any(node.target in _LARGE for node in graph.nodes)
    return Fused(fx.GraphModule(module, graph), places, direct, chained and not large, turn)


def _order(graph: fx.Graph, at: dict[fx.Node, Place | Bound]) -> tuple[Place | Bound, ...]:
    """In the order of the graph's inputs; those that nothing reads any more are gone."""
    for node in [node for node in at if not node.users]:
        graph.erase_node(node)
        del at[node]
    return tuple(at[node] for node in graph.nodes if node in at)


class _Pass:
    def __init__(self, graph: fx.Graph, weights: int) -> None:
        self._graph = graph
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.rows = inputs[weights:]
        self.at: dict[fx.Node, Place | Bound] = {
            node: Place((i,)) for i, node in enumerate(inputs[:weights])
        }
        self._whole = {node: i for i, node in enumerate(inputs[:weights])}
        self._transposed: dict[fx.Node, bool] = {}

    def run(self) -> None:
        groups: dict[Any, list[fx.Node]] = {}
        for node in list(self._graph.nodes):
            transposed = self._make_linear(node)
            if self._is_product(node):
                self._transposed[node] = transposed
                x, weight, *bias = node.args
                key = x, weight.meta["val"].dtype, bool(bias and bias[0]), transposed
                groups.setdefault(key, []).append(node)
        for group in groups.values():
            if len(group) == 1:
                self._fuse_one(group[0])
            elif not self._fuse_gate(group):
                self._fuse_many(group)
        for node in list(self._graph.nodes):
            if node.target is aten.view.default:  # of parts of a product, which have strides
                node.target = aten.reshape.default

    def pack_experts(self) -> None:
        """Has experts' matrices be panels, where they are in bfloat16 and of even inputs."""
        for node in list(self._graph.nodes):
            if node.target is not torch.ops.cloverinfer.expert_linear.default:
                continue
            x, weight, bias, experts, transposed = node.args
            val = weight.meta["val"]
            outputs, inputs = val.shape[1:][::-1] if transposed else val.shape[1:]
            if weight not in self._whole or val.dtype != torch.bfloat16 or inputs % 2:
                continue
            with self._graph.inserting_before(self.rows[0]):
                panels = self._graph.placeholder(f"e{self._whole[weight]}")
            panels.meta["val"] = val
            self.at[panels] = Place((self._whole[weight],), transposed=transposed, experts=True)
            node.target = torch.ops.cloverinfer.expert_panels.default
            node.args = (x, panels, bias, experts, int(outputs))

    def take_norms(self) -> None:
        """Has norms be the kernels of native halves, and go along with a product before them."""
        for node in list(self._graph.nodes):
            if node.target is not aten.rms_norm.default:
                continue
            x, size, weight, eps = (*node.args, None, None)[:4]
            if not isinstance(weight, fx.Node) or not isinstance(eps, float) or len(size) != 1:
                continue
            if weight.meta["val"].dtype != x.meta["val"].dtype:
                continue
            node.target, node.args = torch.ops.cloverinfer.norm.default, (x, weight, eps)
            if x.target is torch.ops.cloverinfer.linear.default and weight in self.at:
                self._take_norm(x, node)

    def _take_norm(self, product: fx.Node, norm: fx.Node) -> None:
        x, weight, bias, residual, *_ = product.args
        if residual is None:
            return
        given = (x, weight, bias, residual, *norm.args[1:])
        with self._graph.inserting_before(product):
            both = self._graph.call_function(torch.ops.cloverinfer.linear_norm.default, given)
            parts = [self._graph.call_function(operator.getitem, (both, i)) for i in range(2)]
        for node, part in zip((product, norm), parts, strict=True):
            part.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(part)
            self._graph.erase_node(node)

    def _make_linear(self, node: fx.Node) -> bool:
        """Makes ``linear`` of a product that is written otherwise; whether its weight is ``[i, o]``
        then, which ``linear`` does not take: it is not to stay."""
        bias: Any = None
        if node.target is aten.addmm.default and not node.kwargs:
            bias, x, weight = node.args
        elif node.target in (aten.mm.default, aten.matmul.default):
            x, weight = node.args
        else:
            return False
        assert isinstance(weight, fx.Node)
        turned = weight.target in (aten.permute.default, aten.t.default, aten.transpose.int)
        source: Any = weight.args[0] if turned else weight
        if source not in self.at or source.meta["val"].ndim != 2:
            return False
        if bias is not None and (bias not in self.at or bias.meta["val"].ndim != 1):
            return False
        if turned and tuple(weight.meta["val"].shape) != tuple(source.meta["val"].shape[::-1]):
            return False
        node.target, node.args = aten.linear.default, (x, source, bias)
        return not turned

    def _is_product(self, node: fx.Node) -> bool:
        if node.target is not aten.linear.default or node.kwargs:
            return False
        _, weight, *bias = node.args
        own = weight in self.at and (not bias or bias[0] is None or bias[0] in self.at)
        return own and weight.meta["val"].ndim == 2  # type: ignore[union-attr]

    def _fuse_one(self, node: fx.Node) -> None:
        add = only_user(node, aten.add.Tensor)
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
            silu = only_user(gate, aten.silu.default)
            product = None if silu is None else only_user(silu, aten.mul.Tensor)
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
        transposed = self._transposed[products[0]]
        weights = [node.args[1] for node in products]
        weight = self._input(weights, folds=2 if gated else 1, transposed=transposed)
        biases = [node.args[2] for node in products if len(node.args) > 2 and node.args[2]]
        bias = self._input(biases) if biases else None
        one = products[0].meta["val"].shape[-1]
        outputs = one if gated else sum(int(node.meta["val"].shape[-1]) for node in products)
        with self._graph.inserting_before(instead or products[0]):
            made = self._graph.call_function(
                torch.ops.cloverinfer.linear.default,
                (products[0].args[0], weight, bias, residual, int(outputs), gated),
            )
        val = (instead or products[0]).meta["val"]
        made.meta["val"] = val.new_empty((*val.shape[:-1], int(outputs)))
        if instead is not None:
            instead.replace_all_uses_with(made)
            self._graph.erase_node(instead)
        return made

    def _input(self, weights: list[fx.Node], folds: int = 0, transposed: bool = False) -> fx.Node:
        parts = tuple(self._whole[node] for node in weights)
        name = "m" + "_".join(map(str, parts)) if folds else "b" + "_".join(map(str, parts))
        with self._graph.inserting_before(self.rows[0]):
            node = self._graph.placeholder(name)
        node.meta["val"] = weights[0].meta["val"]
        self.at[node] = Place(parts, folds, transposed)
        return node


def _alike(one: fx.Node, other: fx.Node) -> bool:
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return str(a.shape) == str(b.shape) and a.dtype == b.dtype


def call_directly(graph: fx.Graph) -> None:
    """Calls of our kernels without PyTorch's dispatcher, which costs as much as a small product."""
    for node in graph.nodes:
        node.target = DIRECT.get(node.target, node.target)
