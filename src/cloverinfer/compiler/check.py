"""Compares a split model with what it was made from, on random tokens.

Three things must hold: the parts give exactly what the whole graph gives; the graph gives what the
model gives, as close as its type allows; and every part gives each token the same whoever stands
beside it, as tokens of many requests share a step.

Shapes: t tokens, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..core.errors import ModelError
from .capture import Captured, NoDropout
from .run import Parts

TOKENS = (1, 2, 37)
"""Lengths of the prompts."""
_WITHIN = {torch.float32: 2e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}
"""Largest difference of logits over the largest logit."""
_NEIGHBOURS = 20
"""Positions that are judged together in half precision."""


def check_parts(captured: Captured, parts: Parts) -> None:
    """``ModelError`` unless the parts are the whole, bit for bit."""
    for tokens in TOKENS:
        ids, positions = _prompt(captured, tokens)
        whole, split = captured.run(ids, positions), parts.run(ids, positions)
        if not torch.equal(whole, split):
            worst = float((whole.float() - split.float()).abs().max())
            raise ModelError(f"the split model differs from the whole by {worst:.3g}")


def check_original(
    captured: Captured, original: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """``original(token_ids [t], positions [t])`` gives the model's own logits ``[t, c]``."""
    window = max((captured.spec_of(call).window or 0 for call in captured.calls), default=0)
    longest = min(window + 20, 1100) if window else 0
    for tokens in (*TOKENS, *([longest] if longest > TOKENS[-1] else [])):
        ids, positions = _prompt(captured, tokens)
        with torch.no_grad(), NoDropout():
            expected = original(ids, positions).float()
        found = captured.run(ids, positions).float()
        apart_t = (found - expected).abs().amax(-1) / expected.abs().max().clamp(min=1e-6)
        dtype = captured.logits.meta["val"].dtype
        apart = _judged(apart_t, dtype)
        if not apart <= _WITHIN[dtype]:
            raise ModelError(
                f"the compiled model differs from the original by {apart:.2g} of the largest logit "
                f"on a prompt of {tokens} tokens: its attention does what no KV spec says, or its "
                "results hang on rounding that much"
            )


def _judged(apart_t: torch.Tensor, dtype: torch.dtype) -> float:
    """The worst position; in half precision the worst median of neighbours, since there a token's
    rounding may choose it another expert, in the original too from one kernel to the next."""
    if dtype == torch.float32:
        return float(apart_t.max())
    return float(torch.stack([some.median() for some in apart_t.split(_NEIGHBOURS)]).max())


def check_rows(captured: Captured, parts: Parts) -> None:
    """``ModelError`` naming the part in which tokens see one another."""
    ids, positions = _prompt(captured, TOKENS[-1])
    # Some of the tokens, in another order.
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))[:20]
    given = [ids]
    within = _WITHIN[captured.logits.meta["val"].dtype]
    for index, stage in enumerate(parts.stages):
        module = parts.modules[index]
        with torch.no_grad():
            out = list(module(positions, *given))
            mixed = module(positions[order], *(value[order] for value in given))
        for value, other in zip(out, mixed, strict=True):
            if not _close(value[order], other, within):
                raise ModelError(f"stage {index} mixes tokens outside of attention")
        given = out
        if stage.asks_attention:
            given = [parts.attend(index, out[0], out[1], out[2]), *out[3:]]


def _close(one: torch.Tensor, other: torch.Tensor, within: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, other)
    one, other = one.float(), other.float()
    return bool((one - other).abs().max() <= within * one.abs().max() + 1e-6)


def _prompt(captured: Captured, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = int(captured.logits.meta["val"].shape[-1])
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(0, vocabulary, (tokens,), generator=generator), torch.arange(tokens)
