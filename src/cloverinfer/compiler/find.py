"""From a model to a captured graph with every call of attention found."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from ..core.errors import ModelError
from .capture import Captured, capture
from .rewrite import rewrite_sdpa
from .written import rewrite_written

aten = torch.ops.aten


def capture_module(
    model: nn.Module, inputs: dict[str, Any] | None = None, has_positions: bool = True
) -> Captured:
    """Like ``capture``, with attention in every form as the operator, numbered by layer.

    ``ModelError`` for a model without attention, or with some that no KV spec can say.
    """
    captured = capture(model, inputs, has_positions)
    rewrite_sdpa(captured)
    rewrite_written(captured)
    captured.number_calls()
    if not captured.calls:
        raise ModelError("the model has no attention that could be found: nothing to split at")
    _settle_types(captured)
    captured.graph.lint()
    return captured


def _settle_types(captured: Captured) -> None:
    """Casts q, k and v to the type of the logits, which is that of the KV cache, and the output
    back: some models compute them in float32."""
    dtype = captured.logits.meta["val"].dtype
    for call in captured.calls:
        own = call.meta["val"].dtype
        if all(x.meta["val"].dtype == dtype for x in call.args[:3]):  # type: ignore[union-attr]
            continue
        with captured.graph.inserting_before(call):
            for index, x in enumerate(call.args[:3]):
                call.update_arg(index, cast(captured.graph, x, dtype))  # type: ignore[arg-type]
        call.meta["val"] = call.meta["val"].to(dtype)
        with captured.graph.inserting_after(call):
            back = captured.graph.call_function(aten.to.dtype, (call, own))
        back.meta["val"] = call.meta["val"].to(own)
        call.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def cast(graph: fx.Graph, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    node = graph.call_function(aten.to.dtype, (x, dtype))
    node.meta["val"] = x.meta["val"].to(dtype)
    return node


def capture_huggingface(model: nn.Module) -> Captured:
    """The graph of a causal language model of transformers, loaded by ``huggingface``."""
    from . import huggingface

    return capture_module(model, *huggingface.inputs_of(model))
