"""The layers of a step whose half and backend are on one device: stages, append, attend.

Shapes: t tokens, r rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.base import AttentionBackend, RotatesOnAppend
from ..models.base import Carry, DenseHalf

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Starts, tables, lengths: as ``AttentionBackend.attend`` takes them."""


@dataclass(frozen=True)
class StepTensors:
    """What all layers of a step read."""

    token_ids_t: torch.Tensor
    positions_t: torch.Tensor
    slots_t: torch.Tensor
    rows: Rows


def run_layers(
    half: DenseHalf, backend: AttentionBackend, step: StepTensors, whole: bool
) -> tuple[torch.Tensor, Carry]:
    """The last layer's attention output and carry. ``whole``: rotation and append are one launch
    where half and backend offer that; not for prompts, whose rotated keys are of use to attend."""
    stages = half.unrotated() if whole and isinstance(backend, RotatesOnAppend) else None
    carry: Carry | None = None
    attn_out: torch.Tensor | None = None
    for layer in range(half.num_layers):
        inputs = layer, attn_out, carry, step.token_ids_t, step.positions_t
        if stages is not None:
            assert isinstance(backend, RotatesOnAppend)
            fused, carry = stages.stage_unrotated(*inputs)
            q = backend.append_rotated(layer, fused, step.slots_t)
        else:
            queries, k, v, carry = half.stage(*inputs)
            assert queries is not None
            assert k is not None
            assert v is not None
            backend.append(layer, k, v, step.slots_t)
            q = queries
        attn_out, _ = backend.attend(layer, q, *step.rows)
    assert attn_out is not None
    assert carry is not None
    return attn_out, carry
