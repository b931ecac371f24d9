"""Log-probabilities of tokens under logits.

Shapes: t rows, c vocabulary, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..core.logprobs import TokenLogprobs


def token_logprobs(
    logits_tc: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """For each row of ``logits_tc`` (float32 ``[t, c]``) that of its token and of the ``counts[i]``
    likeliest tokens."""
    assert len(tokens) == len(counts) == logits_tc.shape[0]
    tokens_t = torch.tensor(tokens, device=logits_tc.device)
    return read_scores(score(logits_tc, tokens_t, max(counts)), tokens, counts)


def score(logits_tc: torch.Tensor, tokens_t: torch.Tensor, count: int) -> torch.Tensor:
    """float64 ``[t, 2 + 2 k]``, so that one copy takes it to the host: the token's number, its
    rank, the numbers of the ``count`` likeliest tokens (at most c), and which they are. Never waits
    for the device."""
    scores = torch.log_softmax(logits_tc.float(), -1)
    chosen = scores.gather(1, tokens_t[:, None])
    ranks = (scores > chosen).sum(-1, keepdim=True) + 1
    parts = [chosen, ranks]
    most = min(count, scores.shape[1])
    if most:
        parts += scores.topk(most, -1)
    return torch.cat([part.double() for part in parts], 1)


def read_scores(
    scores: torch.Tensor, tokens: Sequence[int], counts: Sequence[int]
) -> list[TokenLogprobs]:
    """What ``score`` gave, as records."""
    most = (scores.shape[1] - 2) // 2
    return [
        TokenLogprobs(
            token,
            logprob,
            int(rank),
            [int(one) for one in top[most : most + count]],
            top[:most][:count],
        )
        for token, (logprob, rank, *top), count in zip(tokens, scores.tolist(), counts, strict=True)
    ]
