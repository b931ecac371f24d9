"""Runs the parts of a split model in order, in this process: what a split is checked with.

Shapes: t tokens, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .capture import Captured
from .operator import ATTENTION
from .partition import Stage


class Parts:
    """The parts, each with its weights bound."""

    def __init__(self, captured: Captured, stages: Sequence[Stage]) -> None:
        self.stages = list(stages)
        self.modules = [stage.bind(captured.tensors) for stage in stages]
        self._calls = [(call.args[3], str(call.args[5])) for call in captured.calls]
        self._sinks = [None if node is None else captured.constant(node) for node, _ in self._calls]

    @torch.no_grad()
    def run(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> torch.Tensor:
        """Logits ``[t, c]`` of one prompt; attention between stages by the operator."""
        given: list[torch.Tensor] = [token_ids_t]
        for index, stage in enumerate(self.stages):
            out = self.modules[index](positions_t, *given)
            given = list(out)
            if stage.asks_attention:
                attn_out = self.attend(index, given[0], given[1], given[2])
                given = [attn_out, *given[3:]]
        (logits,) = given
        return logits

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = ATTENTION(q, k, v, self._sinks[layer], layer, self._calls[layer][1])
        return out
