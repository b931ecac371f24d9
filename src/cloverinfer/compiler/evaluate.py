"""Runs a part of a graph, as far back as one value needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx


def evaluate(node: fx.Node, given: Mapping[fx.Node, Any]) -> Any:
    """The value of ``node``, from the values of others. ``KeyError`` with the input that is not
    ``given`` where ``node`` needs it."""
    values: dict[fx.Node, Any] = dict(given)
    pending = [node]
    with torch.no_grad():
        while pending:
            at = pending[-1]
            if at in values:
                pending.pop()
                continue
            missing = [one for one in at.all_input_nodes if one not in values]
            if missing:
                pending += missing
                continue
            if at.op != "call_function":
                raise KeyError(at.name)
            assert callable(at.target)
            args = fx.map_arg(at.args, values.__getitem__)
            kwargs = fx.map_arg(at.kwargs, values.__getitem__)
            values[at] = at.target(*args, **kwargs)
            pending.pop()
    return values[node]
