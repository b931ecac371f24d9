"""Cuts a captured graph into stages, on the graph alone: no module names, no model.

A stage is a graph of its own, ``(weights..., inputs...) -> outputs``. What is made in one stage and
used in a later one is found by liveness and becomes the *carry*. What depends on no token is made
again where it is used; the number of tokens is read off the positions.

Shapes: t tokens. Carry tensors have the tokens first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import fx

from ..core.errors import ModelError
from .capture import Captured
from .rewrite import emit

aten = torch.ops.aten


@dataclass(frozen=True)
class Stage:
    """One stage. Its graph takes weights, positions, token ids where ``reads_tokens``, o ``[t, h,
    e]`` where ``reads_attention``, and then the carry; it gives q, k, v where ``asks_attention``,
    and then the next carry, of the last stage the logits."""

    graph: fx.Graph
    weights: tuple[str, ...]
    reads_tokens: bool
    reads_attention: bool
    asks_attention: bool
    carry_in: tuple[str, ...]
    """Names of the values in the captured graph."""
    carry_out: tuple[str, ...]

    def bind(self, tensors: dict[str, torch.Tensor]) -> fx.GraphModule:
        """A module that holds this stage's weights, and only these; not copied. Called with what
        the graph takes but the weights."""
        graph = fx.Graph()
        root = torch.nn.Module()
        copied: dict[fx.Node, fx.Node] = {}
        for node in self.graph.nodes:
            index = len(copied)
            if index < len(self.weights):
                name = _attribute(self.weights[index])
                root.register_buffer(name, tensors[self.weights[index]])
                copied[node] = graph.get_attr(name)
            else:
                copied[node] = graph.node_copy(node, copied.__getitem__)
        return fx.GraphModule(root, graph)


def _attribute(name: str) -> str:
    return name.replace(".", "_")


class Partition:
    """The work of cutting. ``stage_of``: the stage that makes each value; ``cuts``: attention calls
    that lie between stages i and i + 1 and in none; ``ends[i]``: what cut i needs of stage i."""

    def __init__(
        self, captured: Captured, stage_of: dict[fx.Node, int], cuts: list[fx.Node]
    ) -> None:
        self._captured = captured
        self._cuts = cuts
        self._stage_of = dict(stage_of)
        self._count = max(stage_of.values(), default=0) + 1
        if cuts:
            self._count = len(cuts) + 1
        self._symbol = str(captured.positions.meta["val"].shape[0])
        self._ends = [_qkv(cut) for cut in cuts]
        for i, cut in enumerate(cuts):
            self._stage_of[cut] = i + 1
        self._stage_of[captured.token_ids] = 0
        self._last_use = self._uses()

    def stages(self) -> list[Stage]:
        return [self._stage(i) for i in range(self._count)]

    # -- liveness

    def _free(self, node: fx.Node) -> bool:
        """Whether a value is in any stage for nothing: weights, positions, and what depends on no
        token, which is made again."""
        if node in self._captured.weights or node is self._captured.positions:
            return True
        return node is not self._captured.token_ids and self._tokens_at(node) is None

    def _tokens_at(self, node: fx.Node) -> int | None:
        """The dimension that counts tokens; None for a value that has none."""
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor):
            return None
        sizes = [str(size) for size in val.shape]
        if self._symbol in sizes:
            return sizes.index(self._symbol)
        return None if all(isinstance(size, int) for size in val.shape) else -1

    def _uses(self) -> dict[fx.Node, int]:
        """The last stage that reads each value, values behind free ones included."""
        last: dict[fx.Node, int] = {}
        for node, stage in self._stage_of.items():
            if node in self._cuts or node is self._captured.token_ids:
                continue
            for value in self._needs(node.all_input_nodes):
                last[value] = max(last.get(value, 0), stage)
        for stage, end in enumerate(self._ends):
            for value in self._needs(end):
                last[value] = max(last.get(value, 0), stage)
        return last

    def _needs(self, values: Iterable[fx.Node]) -> set[fx.Node]:
        """What must be there for ``values``: themselves, or what free ones are made again from."""
        found: set[fx.Node] = set()
        pending, seen = list(values), set()
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if not self._free(node):
                found.add(node)
            elif not self._counts_tokens(node):
                pending += node.all_input_nodes
        return found

    def _counts_tokens(self, node: fx.Node) -> bool:
        val = node.meta.get("val")
        return isinstance(val, torch.SymInt) and str(val) == self._symbol

    def carry(self, stage: int) -> list[fx.Node]:
        """Values made in or before ``stage`` and read after it, in the order of the graph. The
        output of attention goes to the stage after its cut by itself."""
        return [
            node
            for node in self._captured.graph.nodes
            if self._stage_of.get(node, self._count) <= stage
            and self._last_use.get(node, -1) > stage
            and not self._free(node)
        ]

    # -- building

    def _stage(self, index: int) -> Stage:
        return _Builder(self, index).build()


class _Builder:
    def __init__(self, cut: Partition, index: int) -> None:
        self._cut = cut
        self._index = index
        self._captured = cut._captured
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._carry_in = cut.carry(index - 1) if index else []
        self._last = index == cut._count - 1

    def build(self) -> Stage:
        cut, index, captured = self._cut, self._index, self._captured
        outputs, carry_out = self._outputs()
        mine = [n for n in captured.graph.nodes if cut._stage_of.get(n) == index]
        mine = [n for n in mine if n.op == "call_function" and n not in cut._cuts]
        weights = self._weights(mine, outputs)
        self._inputs(weights)
        for node in mine:
            self._copy(node)
        ends = cut._ends[index] if index < len(cut._ends) else []
        results = [self._copy(node) for node in ends]
        results += [self._tokens_first(self._copy(node), node) for node in carry_out]
        if self._last:
            results.append(self._copy(captured.logits))
        self._graph.output(tuple(results))
        self._graph.eliminate_dead_code()
        return Stage(
            graph=self._graph,
            weights=tuple(captured.weights[node] for node in weights),
            reads_tokens=index == 0,
            reads_attention=bool(cut._cuts) and index > 0,
            asks_attention=bool(ends),
            carry_in=tuple(node.name for node in self._carry_in),
            carry_out=tuple(node.name for node in carry_out),
        )

    def _outputs(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """All values that leave the stage, and those that leave it as carry."""
        carry = [] if self._last else self._cut.carry(self._index)
        ends = self._cut._ends[self._index] if self._index < len(self._cut._ends) else []
        return [*ends, *carry, *([self._captured.logits] if self._last else [])], carry

    def _weights(self, mine: list[fx.Node], outputs: list[fx.Node]) -> list[fx.Node]:
        """Weights that the stage reads, also to make free values again."""
        found: set[fx.Node] = set()
        local = set(mine)
        pending, seen = [*mine, *outputs], set()
        while pending:
            node = pending.pop()
            if node in seen or self._cut._counts_tokens(node):
                continue
            seen.add(node)
            if node in self._captured.weights:
                found.add(node)
            elif node in local or self._cut._free(node):
                pending += node.all_input_nodes
        return [node for node in self._captured.weights if node in found]

    def _inputs(self, weights: list[fx.Node]) -> None:
        captured, index = self._captured, self._index
        for number, node in enumerate(weights):
            self._place(node, f"w{number}")
        self._place(captured.positions, "positions")
        if index == 0:
            self._place(captured.token_ids, "token_ids")
        if self._cut._cuts and index > 0:
            self._place(self._cut._cuts[index - 1], "attn_out")
        arrived = [(node, self._place(node, f"c{i}")) for i, node in enumerate(self._carry_in)]
        for node, placed in arrived:
            self._made[node] = self._tokens_back(placed, node)

    def _place(self, node: fx.Node, name: str) -> fx.Node:
        placed = self._graph.placeholder(name)
        placed.meta["val"] = node.meta["val"]
        self._made[node] = placed
        return placed

    def _copy(self, node: fx.Node) -> fx.Node:
        """``node`` in this stage's graph, with what it needs made before it."""
        pending = [node]
        while pending:
            at = pending[-1]
            if at in self._made:
                pending.pop()
                continue
            if self._cut._counts_tokens(at):
                size = emit(self._graph, aten.sym_size.int, self._made[self._captured.positions], 0)
                self._made[at] = size
                continue
            missing = [one for one in at.all_input_nodes if one not in self._made]
            if missing:
                pending += missing
                continue
            assert at.op == "call_function", f"{at.name} is not in stage {self._index}"
            self._made[at] = self._graph.node_copy(at, self._made.__getitem__)
            pending.pop()
        return self._made[node]

    def _tokens_first(self, made: fx.Node, node: fx.Node) -> fx.Node:
        dim = self._dim(node)
        return made if dim == 0 else emit(self._graph, aten.movedim.int, made, dim, 0)

    def _tokens_back(self, made: fx.Node, node: fx.Node) -> fx.Node:
        dim = self._dim(node)
        if dim == 0:
            return made
        made.meta["val"] = aten.movedim.int(node.meta["val"], dim, 0)
        return emit(self._graph, aten.movedim.int, made, 0, dim)

    def _dim(self, node: fx.Node) -> int:
        dim = self._cut._tokens_at(node)
        assert dim is not None
        sizes = [str(size) for size in node.meta["val"].shape]
        if dim < 0 or sizes.count(self._cut._symbol) > 1:
            raise ModelError(
                f"a value of shape {sizes} that does not belong to single tokens crosses a cut "
                f"({node.name}): the model mixes tokens outside of attention, or the cut is where "
                "rows are something else"
            )
        return dim


def _qkv(call: fx.Node) -> list[fx.Node]:
    return list(call.args[:3])  # type: ignore[arg-type]


def split_at_attention(captured: Captured) -> list[Stage]:
    """Stages 0 to L. Each value is made in the stage that first reads it: early enough for q, k
    and v, late enough that stages carry little and that rows nobody samples after are dropped."""
    after = _depths(captured)
    needed: dict[fx.Node, int] = {captured.logits: len(captured.calls)}
    for node in reversed(list(captured.graph.nodes)):
        if node.op != "call_function":
            continue
        if node in captured.calls:
            layer = captured.calls.index(node)
            for end in _qkv(node):
                needed[end] = min(needed.get(end, layer), layer)
            continue
        at = needed[node]
        assert at >= after[node]
        for one in node.all_input_nodes:
            needed[one] = min(needed.get(one, at), at)
    stage_of = {node: needed[node] for node in after if node not in captured.calls}
    return Partition(captured, stage_of, captured.calls).stages()


def _depths(captured: Captured) -> dict[fx.Node, int]:
    """How many attention calls must be done before each value can be made. Calls are in order: one
    that needs less than the call before it still comes after it."""
    depth: dict[fx.Node, int] = {}
    for node in captured.graph.nodes:
        if node.op == "call_function":
            before = max((depth.get(one, 0) for one in node.all_input_nodes), default=0)
            layer = captured.calls.index(node) if node in captured.calls else None
            depth[node] = before if layer is None else layer + 1
    return depth


def split_by(captured: Captured, other: Callable[[fx.Node], bool]) -> list[Stage]:
    """Parts in the order of the graph: a new one wherever ``other`` of a node changes. Calls of
    attention are inside parts. Parts 0, 2, ... are those where it is False."""
    stage_of: dict[fx.Node, int] = {}
    at = 0
    for node in captured.graph.nodes:
        if node.op != "call_function":
            continue
        if other(node) != bool(at % 2):
            at += 1
        stage_of[node] = at
    return Partition(captured, stage_of, []).stages()
