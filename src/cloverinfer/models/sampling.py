"""Chooses tokens from logits.

A draw is a pure function of a row's logits, its parameters, its seed and its position: no state,
no other row, and so no batch or topology can change it. Tokens with equal logits are kept or
dropped together by top-k and top-p, so their order does not matter.

Shapes: t rows, c vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import _native
from ..wire.messages import Sampling

_MASK = (1 << 64) - 1
_TOP_P_TRY = 512
"""Likeliest tokens that top-p sorts before it sorts them all."""
NO_TOKEN = -1
"""Stands for no token, where none can be chosen."""


def sample(
    logits_tc: torch.Tensor, params: Sequence[Sampling], positions: Sequence[int]
) -> list[int]:
    """A token for each row of ``logits_tc`` (float32 ``[t, c]``).

    ``positions``: the position that each row's token will take, or any other number that differs
    between the tokens of one request. Temperature 0 takes the largest logit, the lowest id first.
    ``NO_TOKEN`` for a row whose largest logit is no finite number: it says nothing of any token.
    """
    assert len(params) == len(positions) == logits_tc.shape[0]
    random = [i for i, p in enumerate(params) if p.temperature > 0]
    tokens = [NO_TOKEN] * len(params)
    if len(random) < len(params):
        tokens = _greedy(logits_tc)
    if not random:
        return tokens
    drawn = _draw(logits_tc[random], [params[i] for i in random], [positions[i] for i in random])
    for i, token in zip(random, drawn, strict=True):
        tokens[i] = token
    return tokens


def _greedy(logits_tc: torch.Tensor) -> list[int]:
    if logits_tc.is_cpu:
        whole_tc = logits_tc.contiguous()
        assert whole_tc.dtype == torch.float32
        return _native.greedy_tokens(whole_tc.data_ptr(), *whole_tc.shape)
    largest = logits_tc.max(-1)
    return largest.indices.masked_fill_(~largest.values.isfinite(), NO_TOKEN).tolist()


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that ``seed`` and ``position`` alone decide (splitmix64, twice)."""
    mixed = _splitmix64(_splitmix64(seed & _MASK) ^ (position & _MASK))
    return (mixed >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    """Vigna's splitmix64: one step of the generator and its output function."""
    z = (state + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _draw(logits_tc: torch.Tensor, params: list[Sampling], positions: list[int]) -> list[int]:
    """Inverse of the cumulative distribution, in vocabulary order and float64."""
    device = logits_tc.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device)
    # Relative to the largest, so that a tiny temperature cannot overflow.
    scores = (logits_tc - logits_tc.amax(-1, keepdim=True)).double().div_(temperature[:, None])
    _keep_top_k(scores, params)
    weights = scores.exp_()
    _keep_min_p(weights, params)
    _keep_top_p(weights, params)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    at = torch.tensor(
        [uniform(p.seed, position) for p, position in zip(params, positions, strict=True)],
        dtype=torch.float64,
        device=device,
    )
    # The first token whose cumulative weight exceeds the target; rounding must not pass the last.
    chosen = torch.searchsorted(cumulative, at[:, None] * total, right=True)
    last = torch.searchsorted(cumulative, total.contiguous(), right=False)
    # Nothing adds up where there was no finite logit to be relative to.
    return torch.minimum(chosen, last).masked_fill_(total.isnan(), NO_TOKEN)[:, 0].tolist()


def _keep_top_k(scores: torch.Tensor, params: list[Sampling]) -> None:
    """Drops what is below the k-th largest, in place."""
    by_k: dict[int, list[int]] = {}
    for row, p in enumerate(params):
        if 0 < p.top_k < scores.shape[1]:
            by_k.setdefault(p.top_k, []).append(row)
    for k, rows in by_k.items():
        some = scores[rows]
        least = some.topk(k, -1).values[:, -1:]
        scores[rows] = some.masked_fill_(some < least, -torch.inf)


def _keep_min_p(weights: torch.Tensor, params: list[Sampling]) -> None:
    """Drops what is below a share of the largest weight, which is 1, in place."""
    rows = [row for row, p in enumerate(params) if p.min_p > 0]
    if rows:
        some = weights[rows]
        least = torch.tensor([params[row].min_p for row in rows], dtype=some.dtype)
        weights[rows] = some.masked_fill_(some < least.to(some.device)[:, None], 0.0)


def _keep_top_p(weights: torch.Tensor, params: list[Sampling]) -> None:
    """Drops what is less likely than the smallest set that reaches p, in place."""
    rows = [row for row, p in enumerate(params) if p.top_p < 1]
    if not rows:
        return
    some = weights[rows]
    p = torch.tensor([params[row].top_p for row in rows], dtype=torch.float64, device=some.device)
    needed = some.sum(-1, keepdim=True) * p[:, None]
    largest = some.topk(min(_TOP_P_TRY, some.shape[1]), -1).values
    reached = largest.cumsum(-1)
    if bool((reached[:, -1:] < needed).any()):
        largest = some.sort(-1, descending=True).values
        reached = largest.cumsum(-1)
    count = torch.searchsorted(reached, needed).clamp_(max=largest.shape[1] - 1)
    weights[rows] = some.masked_fill_(some < largest.gather(-1, count), 0.0)
