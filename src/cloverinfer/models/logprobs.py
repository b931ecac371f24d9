"""Log-probabilities of tokens under logits.

Shapes: t rows, c vocabulary.
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
    scores = torch.log_softmax(logits_tc.float(), -1)
    chosen = scores.gather(1, torch.tensor(tokens, device=scores.device)[:, None])
    ranks = ((scores > chosen).sum(-1) + 1).tolist()
    most = min(max(counts), scores.shape[1])
    top = scores.topk(most, -1) if most else None
    values = top.values.tolist() if top else [[]] * len(tokens)
    ids = top.indices.tolist() if top else values
    return [
        TokenLogprobs(token, logprob, rank, ids[i][:count], values[i][:count])
        for i, (token, logprob, rank, count) in enumerate(
            zip(tokens, chosen[:, 0].tolist(), ranks, counts, strict=True)
        )
    ]
