"""Finds attention that a model writes out as two products around a softmax, as BLOOM and MPT do.

How scores become what the softmax sees is probed with numbers: it must be ``scale * score`` plus
what a KV spec can say. Anything else is refused by name.

Shapes: t tokens, h heads, d the key size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ..core.errors import ModelError
from .capture import Captured, drop_dead
from .evaluate import evaluate
from .operator import CallSpec
from .rewrite import SHORT, check_same_tokens, emit, inputs_of, read_by_value, replace_attention

aten = torch.ops.aten
_SOFTMAX = (aten._softmax.default, aten.softmax.int, aten._safe_softmax.default)
_PRODUCTS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default)
_THROUGH = (
    aten.clone.default,
    aten._to_copy.default,
    aten.to.dtype,
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.alias.default,
    aten.detach.default,
)
"""Between the softmax and the product with values."""


def rewrite_written(captured: Captured) -> int:
    """Replaces attention written out; returns how often."""
    found = 0
    for softmax in [node for node in captured.graph.nodes if node.target in _SOFTMAX]:
        out = _product_of(softmax)
        score = _score_of(softmax) if out is not None else None
        if out is None or score is None:
            continue  # of a router, say
        _rewrite(captured, softmax, score, out, f"attention call {found} (written out)")
        found += 1
    drop_dead(captured)
    return found


def _is_square(node: fx.Node) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= 3 and not isinstance(shape[-1], int) and str(shape[-1]) == str(shape[-2])


def _product_of(softmax: fx.Node) -> fx.Node | None:
    """The product of probabilities and values."""
    if not _is_square(softmax):
        return None
    at = softmax
    while len(at.users) == 1:
        (user,) = at.users
        if user.target in _PRODUCTS[:2] and user.args[0] is at:
            return user
        if user.target not in _THROUGH:
            return None
        at = user
    return None


def _score_of(softmax: fx.Node) -> fx.Node | None:
    """The product of queries and keys: the nearest one that the softmax's input is made of."""
    pending, seen = [softmax.args[0]], set()
    while pending:
        at = pending.pop(0)
        if at in seen or not isinstance(at, fx.Node):
            continue
        seen.add(at)
        if at.target in _PRODUCTS and _is_square(at):
            return at
        pending += at.all_input_nodes
    return None


def _rewrite(
    captured: Captured, softmax: fx.Node, score: fx.Node, out: fx.Node, where: str
) -> None:
    seen = softmax.args[0]
    assert isinstance(seen, fx.Node)
    added = score.target is aten.baddbmm.default
    q, k_turned = score.args[1:3] if added else score.args[:2]

    def probe(fed: Mapping[fx.Node, Any], number: float, tokens: int) -> torch.Tensor:
        shape = [n if isinstance(n, int) else tokens for n in score.meta["val"].shape]
        value = torch.full(shape, number, dtype=score.meta["val"].dtype)
        if added:
            beta, alpha = (score.kwargs.get(name, 1) for name in ("beta", "alpha"))
            value = beta * evaluate(score.args[0], fed) + alpha * value  # type: ignore[arg-type]
        return evaluate(seen, {**fed, score: value})  # type: ignore[no-any-return]

    bias = read_by_value(captured, seen, lambda fed, tokens: probe(fed, 0.0, tokens), where)
    fed = inputs_of(captured, SHORT, 0)
    at = [probe(fed, number, SHORT)[..., -1, -1].flatten().double() for number in (0.0, 1.0, -3.0)]
    scale = float((at[1] - at[0]).mean())
    straight = torch.cat([at[1] - at[0] - scale, at[2] - at[0] + 3 * scale]).abs().max()
    if not straight < 1e-3 * max(1.0, abs(scale)):
        raise ModelError(f"{where}: what it does with its scores is not a scale and a sum")
    with captured.graph.inserting_before(out):
        k = emit(captured.graph, aten.transpose.int, k_turned, -1, -2)
    check_same_tokens(q, k, where)  # type: ignore[arg-type]
    spec = CallSpec(scale, bias.window, None, bias.alibi_slopes)
    replace_attention(captured, out, (q, k, out.args[1]), spec)  # type: ignore[arg-type]
