"""Finds the rotation that ends a stage, and cuts it off: queries and keys are then rotated where
the product wrote them, by whoever runs the stage.

The kernels that rotate read one half of cos and sin, whose halves are equal in all that rotates so.
That is made sure of where they are computed, and followed through the carry. It knows nothing of
devices.

Shapes: t tokens, h query heads, n KV heads, d head size.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .shorten import Rotations, find_rotations
from .slots import COPIES, TOKENS, VIEWS, axis_of, compact, sizes_of, view

aten = torch.ops.aten
_LOOKS = VIEWS | COPIES | {operator.getitem}
_TABLES = _LOOKS | {
    aten.sym_size.int,
    aten._to_copy.default,
    aten.arange.default,
    aten.mul.Tensor,
    aten.add.Tensor,
    aten.div.Tensor,
    aten.pow.Scalar,
    aten.reciprocal.default,
    aten.mm.default,
    aten.bmm.default,
    aten.matmul.default,
    aten.cat.default,
    aten.cos.default,
    aten.sin.default,
}
"""Operators that tables of rotary positions are made by."""
_CARRY = 2
"""Of a stage's inputs after its weights; before it are positions, and tokens or attention."""
_QKV = 3


@dataclass(frozen=True)
class Turn:
    """What is left to do for a stage that gives the product's rows ``[t, h + 2n, d]`` and cos and
    sin ``[t, 1, d]`` instead of q, k and v."""

    kv_heads: int


def equal_halves(graph: fx.Graph, weights: int, carried: frozenset[int]) -> frozenset[int]:
    """Which parts of the carry have equal halves after a stage, if ``carried`` had them before."""
    rows = [node for node in graph.nodes if node.op == "placeholder"][weights:]
    known = {rows[_CARRY + i] for i in carried}
    results = _results(graph)[_QKV:]
    return frozenset(i for i, node in enumerate(results) if _halves_are_equal(node, known))


def _results(graph: fx.Graph) -> list[fx.Node]:
    (output,) = (node for node in graph.nodes if node.op == "output")
    return list(output.args[0])


def _halves_are_equal(node: fx.Node, known: set[fx.Node]) -> bool:
    """Tried with random numbers, of which no two are the same, but in the halves of ``known``."""
    needed = _needed(node)
    val = node.meta["val"]
    if needed is None or not val.dtype.is_floating_point or val.shape[-1] % 2:
        return False
    env: dict[fx.Node, Any] = {}
    for one in node.graph.nodes:
        if one not in needed:
            continue
        if one.op == "placeholder":
            env[one] = _random(one, one in known, len(env))
        else:
            args, kwargs = fx.node.map_arg((one.args, one.kwargs), lambda arg: env[arg])
            env[one] = one.target(*args, **kwargs)
    low, high = env[node].chunk(2, -1)
    return torch.equal(low, high)


def _needed(node: fx.Node) -> set[fx.Node] | None:
    """All that a value is made of; None where that is no table of positions."""
    needed: set[fx.Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one.op != "placeholder" and one.target not in _TABLES:
            return None
        if one not in needed:
            needed.add(one)
            todo += one.all_input_nodes
    return needed


def _random(node: fx.Node, halves: bool, seed: int) -> torch.Tensor:
    val, sizes = node.meta["val"], sizes_of(node)
    generator = torch.Generator().manual_seed(seed)
    if not val.dtype.is_floating_point:
        return torch.randint(1, 1000, sizes, generator=generator).to(val.device, val.dtype)
    made = torch.rand(sizes, generator=generator) + 0.1
    if halves:
        made = torch.cat([made[..., : sizes[-1] // 2]] * 2, -1)
    return made.to(val.device, val.dtype)


def cut_turn(graph: fx.Graph, rows: Sequence[fx.Node], carried: frozenset[int]) -> Turn | None:
    """Has the graph give what ``Turn`` says, where queries, keys and values are no more than a
    product's rows, the first two rotated. ``rows``: the graph's inputs after its weights;
    ``carried``: parts of the carry with equal halves."""
    results = _results(graph)
    if len(results) <= _QKV:
        return None  # the last stage
    rotations = find_rotations(graph)
    q, k, v = (_value_of(node, rotations) for node in results[:_QKV])
    if q is None or k is None or v is None or not _belong_together(q, k, v):
        return None
    known = {rows[_CARRY + i] for i in carried}
    if not all(_halves_are_equal(table, known) for table in q.tables):
        return None
    if _reached(q.product) & set(results[_QKV:]):
        return None  # what is rotated in place would change for others
    kv_heads, size = k.sample.shape[1:]
    with graph.inserting_before(graph.output_node()):
        shape = [-1, q.sample.shape[1] + 2 * kv_heads, size]
        fused = graph.call_function(aten.reshape.default, (q.product, shape))
        tables = [
            graph.call_function(aten.reshape.default, (table, [-1, 1, size])) for table in q.tables
        ]
    graph.output_node().args = ((fused, *tables, *results[_QKV:]),)
    graph.eliminate_dead_code()
    return Turn(kv_heads)


def _reached(node: fx.Node) -> set[fx.Node]:
    """All that is made of a value."""
    reached: set[fx.Node] = set()
    todo = list(node.users)
    while todo:
        one = todo.pop()
        if one not in reached:
            reached.add(one)
            todo += one.users
    return reached


@dataclass(frozen=True)
class _Value:
    """Queries, keys or values: where they lie in a product's rows, and what they are rotated by."""

    product: fx.Node
    sample: torch.Tensor
    tables: tuple[fx.Node, ...]


def _value_of(node: fx.Node, rotations: Rotations) -> _Value | None:
    path: list[fx.Node] = []
    while node.target is not torch.ops.cloverinfer.linear.default:
        path.append(node)
        if node in rotations:
            node = rotations[node][0]
        elif node.target in _LOOKS:
            node = node.args[0]  # type: ignore[assignment]
        else:
            return None
    axis = _token_axis(node)
    if axis is None:
        return None
    shown: Any = compact(sizes_of(node), axis)
    tables: tuple[fx.Node, ...] = ()
    for one in reversed(path):
        if one in rotations:
            tables = rotations[one][1:]
            if not _fit(shown, tables):
                return None
        else:
            shown = _looked_at(one, shown)
    return None if shown is None else _Value(node, shown, tables)


def _looked_at(node: fx.Node, shown: Any) -> Any:
    """What a view shows of what another showed."""
    if shown is None or node.target in COPIES:
        return shown
    if node.target is operator.getitem:
        return shown[node.args[1]]
    numbers = {one: one.meta["val"] for one in node.all_input_nodes if one is not node.args[0]}
    known = {one: n if isinstance(n, int) else TOKENS for one, n in numbers.items()}
    args, kwargs = fx.node.map_arg((node.args[1:], node.kwargs), lambda one: known[one])
    return view(shown, node.target, args, kwargs)


def _token_axis(node: fx.Node) -> int | None:
    """The one dimension whose size depends on the call."""
    free = [i for i, n in enumerate(node.meta["val"].shape) if not isinstance(n, int)]
    return free[0] if len(free) == 1 else None


def _fit(shown: Any, tables: Sequence[fx.Node]) -> bool:
    """Whether tables are one row of numbers for each token, as long as a head."""
    if shown is None or isinstance(shown, (list, tuple)) or axis_of(shown) is None:
        return False
    from_right = shown.ndim - axis_of(shown)
    for table in tables:
        axis, sizes = _token_axis(table), sizes_of(table)
        if axis is None or len(sizes) - axis != from_right or sizes[-1] != shown.shape[-1]:
            return False
        if any(n != 1 for i, n in enumerate(sizes[:-1]) if i != axis):
            return False
    return True


def _belong_together(q: _Value, k: _Value, v: _Value) -> bool:
    """Whether they are all of a product's rows, in order, the first two rotated alike."""
    if q.product is not k.product or q.product is not v.product:
        return False
    if not q.tables or q.tables != k.tables or v.tables:
        return False
    at, size = 0, q.sample.shape[-1]
    for value in (q, k, v):
        if value.sample.ndim != 3 or not _is_part(value.sample, at, size):
            return False
        at += value.sample.shape[1] * size
    dtype = q.product.meta["val"].dtype
    whole = at == q.product.meta["val"].shape[-1] and v.sample.shape[1] == k.sample.shape[1]
    return whole and all(table.meta["val"].dtype == dtype for table in q.tables)


def _is_part(sample: torch.Tensor, at: int, size: int) -> bool:
    """Whether it is heads of this size, one after the other, from there on."""
    wanted = compact((TOKENS, sample.shape[1], size), 0)
    if sample.shape != wanted.shape or sample.storage_offset() != at:
        return False
    dims = zip(sample.shape, sample.stride(), wanted.stride(), strict=True)
    return all(one == other or n == 1 for n, one, other in dims)
