"""Reads what a model adds to its attention scores: causal, a window, ALiBi, or something else.

It works on values, at some length, not on how a model computes them.

Shapes: h heads (or 1), t tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..core.errors import ModelError

_HIDDEN = 0.25
"""Of a type's least number: what is below hides a position, as masks add that number, or twice."""


@dataclass(frozen=True)
class Bias:
    window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None


def read_mask(mask: torch.Tensor, where: str) -> Bias:
    """``mask``: boolean (True: seen) or added to scores; ``[..., t, t]``. ``ModelError`` names
    ``where`` it is used if it is none of what a KV spec can say."""
    if mask.dtype == torch.bool:
        seen, added = mask, torch.zeros(())
    else:
        seen = mask > torch.finfo(mask.dtype).min * _HIDDEN
        added = mask.masked_fill(~seen, 0.0).float()
    seen_htt = seen.reshape(-1, *seen.shape[-2:])
    if not torch.equal(seen_htt, seen_htt[:1].expand_as(seen_htt)):
        raise ModelError(f"{where}: heads see different positions, which no KV spec can say")
    window = _window(seen_htt[0], where)
    added_htt = added.expand(seen.shape).reshape(-1, *seen.shape[-2:])
    return Bias(window, _slopes(added_htt, seen_htt[0], where))


def _window(seen_tt: torch.Tensor, where: str) -> int | None:
    tokens = seen_tt.shape[0]
    at = torch.arange(tokens)
    distance_tt = at[:, None] - at
    window = int(seen_tt[-1].sum())
    expected = (distance_tt >= 0) & (distance_tt < window)
    if not torch.equal(seen_tt, expected):
        if not seen_tt.triu(1).any():
            raise ModelError(f"{where}: its mask is causal, but neither full nor a window")
        raise ModelError(f"{where}: attention that sees later tokens is not supported")
    return None if window == tokens else window


def _slopes(added_htt: torch.Tensor, seen_tt: torch.Tensor, where: str) -> tuple[float, ...] | None:
    """A constant per row changes no softmax, so each row counts from its last position."""
    relative = added_htt - added_htt.diagonal(dim1=1, dim2=2)[..., None]
    relative = relative.masked_fill(~seen_tt, 0.0)
    if not relative.any():
        return None
    slopes_h = -relative[:, -1, -2]
    at = torch.arange(seen_tt.shape[0])
    expected = (slopes_h[:, None, None] * (at - at[:, None])).masked_fill(~seen_tt, 0.0)
    if not torch.allclose(relative, expected, rtol=1e-3, atol=1e-4):
        raise ModelError(f"{where}: it adds to its scores what is not ALiBi")
    return tuple(slopes_h.tolist())
