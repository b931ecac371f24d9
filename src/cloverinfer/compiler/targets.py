"""Where else than at attention a model can be cut: between attention and the FFN of each layer.

It looks at products only: those that attention's output goes into, those that make the next q, k
and v, and the others between them, which are the FFN's. The cut is where the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

from ..core.errors import ModelError
from ..models import operators as _operators  # noqa: F401 - registers expert_linear
from .capture import Captured
from .partition import Stage, split_by

aten = torch.ops.aten
PRODUCTS = frozenset(
    {
        aten.linear.default,
        aten.matmul.default,
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        torch.ops.cloverinfer.expert_linear.default,
    }
)


def split_ffn(captured: Captured) -> list[Stage]:
    """Parts 0, 2, ...: attention with its projections; parts 1, 3, ...: FFNs (or experts).

    ``ModelError`` for a model that has no product between one attention and the next.
    """
    order = [node for node in captured.graph.nodes if node.op == "call_function"]
    index = {node: i for i, node in enumerate(order)}
    inside: set[fx.Node] = set()
    for layer in range(len(captured.calls)):
        span = _ffn_span(captured, order, index, layer)
        if span is not None:
            inside.update(order[span[0] : span[1]])
    if not inside:
        raise ModelError("no product stands between one attention and the next: there is no FFN")
    return split_by(captured, inside.__contains__)


def _ffn_span(
    captured: Captured, order: list[fx.Node], index: dict[fx.Node, int], layer: int
) -> tuple[int, int] | None:
    """First and end of the layer's FFN in the order of the graph."""
    calls = captured.calls
    first = index[calls[layer]] + 1
    last_layer = layer + 1 == len(calls)
    end = len(order) if last_layer else index[calls[layer + 1]]
    between = [i for i in range(first, end) if order[i].target in PRODUCTS]
    out = {index[n] for n in _reached([calls[layer]], lambda node: node.users)}
    ends = [captured.logits] if last_layer else list(calls[layer + 1].args[:3])
    into = {index[n] for n in _reached(ends, lambda node: node.all_input_nodes)}  # type: ignore[arg-type]
    ffn = [i for i in between if i not in out | into]
    if not ffn:
        return None
    before = max([i for i in out if i < ffn[0]], default=first - 1)
    after = min([i for i in into if i > ffn[-1]], default=end)
    start = _cheapest(order, range(before + 1, ffn[0] + 1))
    return start, _cheapest(order, range(ffn[-1] + 1, after + 1))


def _reached(starts: list[fx.Node], step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The first products in a direction, from ``starts`` on."""
    found, seen = set(), set()
    pending = list(starts)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target in PRODUCTS:
            found.add(node)
            continue
        pending += [one for one in step(node) if one.op == "call_function"]
    return found


def _cheapest(order: list[fx.Node], places: range) -> int:
    """The place before which a cut is crossed by the fewest bytes; the last of equals."""
    return min(reversed(places), key=lambda place: _crossing(order, place))


def _crossing(order: list[fx.Node], place: int) -> int:
    before, after = set(order[:place]), set(order[place:])
    total = 0
    for node in before:
        val = node.meta["val"]
        if not isinstance(val, torch.Tensor) or not any(user in after for user in node.users):
            continue
        sizes = [n if isinstance(n, int) else 1 for n in val.shape]
        if len(sizes) > sum(isinstance(n, int) for n in val.shape):  # what depends on tokens
            total += torch.Size(sizes).numel() * val.dtype.itemsize
    return total
