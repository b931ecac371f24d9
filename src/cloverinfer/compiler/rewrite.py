"""Puts the attention operator where a model calls torch's own attention, or writes it out.

A pass over a captured graph. What is added to scores is read by value (``masks``), at two lengths;
what the operator cannot say is refused, naming the call.

Shapes: t tokens, h query heads, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ..core.errors import ModelError
from .capture import Captured, drop_dead
from .evaluate import evaluate
from .masks import Bias, read_mask
from .operator import ATTENTION, UNNUMBERED, CallSpec

aten = torch.ops.aten
SHORT, LONG = 9, 4097
"""Tokens that masks are read at; windows from ``LONG`` on in such a mask are not seen."""
_WITH_HEADS = 257
"""Instead of ``LONG`` where each head has a matrix of its own."""


def rewrite_sdpa(captured: Captured) -> int:
    """Replaces calls of ``scaled_dot_product_attention``; returns how many there were."""
    target = aten.scaled_dot_product_attention.default
    calls = [node for node in captured.graph.nodes if node.target is target]
    for number, call in enumerate(calls):
        _rewrite_call(captured, call, f"attention call {number} (scaled_dot_product_attention)")
    drop_dead(captured)
    return len(calls)


def _rewrite_call(captured: Captured, call: fx.Node, where: str) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    q, k, v, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
    check_same_tokens(q, k, where)
    bias = Bias()
    if isinstance(mask, fx.Node):
        bias = read_by_value(captured, mask, lambda fed, _: evaluate(mask, fed), where)
    elif not given.get("is_causal"):
        raise ModelError(f"{where}: attention without a causal mask is not supported")
    scale = given.get("scale")
    if scale is None:
        scale = int(q.meta["val"].shape[-1]) ** -0.5
    spec = CallSpec(float(scale), bias.window, None, bias.alibi_slopes)
    k, v = _ungrouped(k), _ungrouped(v)
    replace_attention(captured, call, (q, k, v), spec)


def check_same_tokens(q: fx.Node, k: fx.Node, where: str) -> None:
    """``ModelError`` unless keys are of the same tokens as queries."""
    there, here = q.meta["val"].shape[-2], k.meta["val"].shape[-2]
    if str(there) != str(here):
        raise ModelError(
            f"{where}: {there} query tokens and {here} key tokens: cross attention and stored "
            "prefixes are not supported"
        )


def read_by_value(
    captured: Captured,
    shaped: fx.Node,
    value: Callable[[Mapping[fx.Node, Any], int], torch.Tensor],
    where: str,
) -> Bias:
    """What ``value`` is at two lengths; ``shaped``: a node whose ``[-3]`` is its heads."""
    val = shaped.meta["val"]
    heads = val.shape[-3] if val.ndim > 2 else 1
    found = []
    for tokens in (SHORT, LONG if heads == 1 else _WITH_HEADS):
        one = value(inputs_of(captured, tokens, 0), tokens)
        if tokens == SHORT:
            other = value(inputs_of(captured, tokens, 1), tokens)
            if not torch.equal(one, other):
                raise ModelError(f"{where}: what is added to its scores depends on the tokens")
        found.append(read_mask(one, where))
    short, long = found
    expected = None if long.window is None or long.window >= SHORT else long.window
    if short.window != expected or (short.alibi_slopes is None) != (long.alibi_slopes is None):
        raise ModelError(f"{where}: its mask changes with the number of tokens")
    return long


def inputs_of(captured: Captured, tokens: int, seed: int) -> dict[fx.Node, Any]:
    """All inputs of the graph, for one prompt of made-up tokens."""
    given: dict[fx.Node, Any] = {n: captured.tensors[name] for n, name in captured.weights.items()}
    generator = torch.Generator().manual_seed(seed)
    given[captured.token_ids] = torch.randint(0, 2, (tokens,), generator=generator)
    given[captured.positions] = torch.arange(tokens)
    return given


def replace_attention(
    captured: Captured, out: fx.Node, qkv: tuple[fx.Node, fx.Node, fx.Node], spec: CallSpec
) -> None:
    """``out`` ``[..., h, t, e]`` becomes the operator's result; q, k, v are ``[..., h, t, d]`` with
    nothing but ones in front."""
    graph = captured.graph
    with graph.inserting_before(out):
        tokens_first = [emit(graph, aten.transpose.int, _bare(graph, x), 0, 1) for x in qkv]
        o = emit(graph, ATTENTION, *tokens_first, None, UNNUMBERED, spec.encode())
        o = emit(graph, aten.transpose.int, o, 0, 1)
        for _ in range(out.meta["val"].ndim - 3):
            o = emit(graph, aten.unsqueeze.default, o, 0)
    out.replace_all_uses_with(o)
    graph.erase_node(out)


def _bare(graph: fx.Graph, x: fx.Node) -> fx.Node:
    while x.meta["val"].ndim > 3:
        if x.meta["val"].shape[0] != 1:
            raise ModelError(f"attention over a batch of {x.meta['val'].shape[0]} is not supported")
        x = emit(graph, aten.select.int, x, 0, 0)
    return x


def emit(graph: fx.Graph, target: Any, *args: Any) -> fx.Node:
    """A call with the meta value that later passes read."""
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda arg: arg.meta["val"]))
    return node


def _ungrouped(x: fx.Node) -> fx.Node:
    """Keys or values before each head of theirs was repeated for its group of query heads."""
    if x.target is aten.repeat_interleave.self_int and x.args[2:3] == (1,):
        return x.args[0]  # type: ignore[return-value]
    at = x
    while at.target in _RESHAPED:
        at = at.args[0]  # type: ignore[assignment]
    unsqueezed = at.args[0] if at.target is aten.expand.default else None
    if not isinstance(unsqueezed, fx.Node) or unsqueezed.target is not aten.unsqueeze.default:
        return x
    inner, dim = unsqueezed.args
    assert isinstance(inner, fx.Node)
    group = at.meta["val"].shape[2] if at.meta["val"].ndim == 5 else 0
    before, after = inner.meta["val"].shape, x.meta["val"].shape
    whole = dim == 2 and len(before) == len(after) == 4 and before[1] * group == after[1]
    return inner if whole and str(before[2]) == str(after[2]) else x


_RESHAPED = (
    aten.view.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten.clone.default,
)
