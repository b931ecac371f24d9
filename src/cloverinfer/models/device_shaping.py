"""Shapes logits on a device, without a round trip to the host: what ``shaping.shape`` does, in its
order, for rows without a grammar.

What a request asks for is told in lists when a step's rows change; what it has said is kept by
seat: how often each token, and its last few. Both are updated there by the token that was chosen
there. Numbers are those of ``shape``, bit by bit. Nothing here waits for the device.

Shapes: t rows, c vocabulary, p rows that penalise, w forbidden words, k last tokens, n seats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.sampling import MAX_TAIL
from ..wire.messages import Shaping

ANY, NONE = -2, -1
"""In a word: every token matches. Among last tokens: none was said yet."""
_ROWS_AT_ONCE = 32
"""Rows that are penalised together: some copies of their logits are in memory meanwhile."""
Lists = dict[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Asking:
    """A row that shapes its logits."""

    row: int
    """Among the step's logits."""
    seat: int
    shaping: Shaping
    early: bool
    """It has not said ``min_tokens`` yet."""


def recalls(shaping: Shaping) -> bool:
    """What such a row has said is kept on the device."""
    return shaping.penalises or bool(_long_words(shaping))


def _long_words(shaping: Shaping) -> list[list[int]]:
    return [word for word in shaping.bad_words if len(word) > 1]


def step_lists(asking: Sequence[Asking], size: int) -> Lists:
    """What the rows of a step ask for; ``size``: of the vocabulary. Places are those of flat
    ``[t, c]`` logits."""
    banned = [(one.row, token) for one in asking for token in _always(one) if token < size]
    biases = [(one.row, *pair) for one in asking for pair in one.shaping.logit_bias.items()]
    words = [(one, word) for one in asking for word in _long_words(one.shaping) if word[-1] < size]
    tailed = [one for one in asking if _long_words(one.shaping)]
    penalising = [one for one in asking if one.shaping.penalises]
    return {
        "ban_at": _whole([row * size + token for row, token in banned]),
        "bias_at": _whole([row * size + token for row, token, _ in biases]),
        "bias_by": _real([by for *_, by in biases]),
        "word_at": _whole([one.row * size + word[-1] for one, word in words]),
        "word_seats": _whole([one.seat for one, _ in words]),
        "word_before": _whole([_padded(word[:-1], ANY) for _, word in words]).reshape(-1),
        "tail_rows": _whole([one.row for one in tailed]),
        "tail_seats": _whole([one.seat for one in tailed]),
        "count_rows": _whole([one.row for one in penalising]),
        "count_seats": _whole([one.seat for one in penalising]),
        "repetition": _real([one.shaping.repetition_penalty for one in penalising]),
        "frequency": _real([one.shaping.frequency_penalty for one in penalising]),
        "presence": _real([one.shaping.presence_penalty for one in penalising]),
    }


def _always(one: Asking) -> list[int]:
    """Tokens that may not be chosen, whatever was said."""
    words = [word[0] for word in one.shaping.bad_words if len(word) == 1]
    return words + (one.shaping.stops if one.early else [])


def _padded(tokens: Sequence[int], by: int) -> list[int]:
    assert len(tokens) <= MAX_TAIL
    return [by] * (MAX_TAIL - len(tokens)) + list(tokens)


def tail_of(said: Sequence[int]) -> list[int]:
    """A seat's last tokens, of all that its request has said."""
    return _padded(said[-MAX_TAIL:], NONE)


def _whole(numbers: Sequence[int] | Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


def _real(numbers: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.array(numbers, np.float64)


def shape_there(
    logits_tc: torch.Tensor, lists: Tensors, tails_nk: torch.Tensor, counts_nc: torch.Tensor
) -> None:
    """Changes ``logits_tc`` (float32, contiguous) in place. ``counts_nc``: 0 for a token that is
    in neither prompt nor output, else how often it was generated, plus one."""
    flat = logits_tc.view(-1)
    if len(lists["ban_at"]):
        flat.index_fill_(0, lists["ban_at"], -torch.inf)
    if len(lists["word_at"]):
        before = lists["word_before"].view(-1, tails_nk.shape[1])
        tails_wk = tails_nk.index_select(0, lists["word_seats"])
        said = ((tails_wk == before) | (before == ANY)).all(1)
        # Added, as several words may end with one token.
        flat.index_add_(0, lists["word_at"], torch.where(said, -torch.inf, 0.0))
    if len(lists["bias_at"]):
        flat.index_add_(0, lists["bias_at"], lists["bias_by"].float())
    for at in range(0, len(lists["count_rows"]), _ROWS_AT_ONCE):
        _penalise(logits_tc, lists, counts_nc, slice(at, at + _ROWS_AT_ONCE))


def _penalise(
    logits_tc: torch.Tensor, lists: Tensors, counts_nc: torch.Tensor, some: slice
) -> None:
    rows = lists["count_rows"][some]
    repetition, frequency, presence = (
        lists[name][some, None].float() for name in ("repetition", "frequency", "presence")
    )
    numbers = torch.finfo(torch.float32)
    repetition.clamp_(min=numbers.tiny)
    plain_pc = logits_tc.index_select(0, rows)
    counts_pc = counts_nc.index_select(0, lists["count_seats"][some])
    less = (plain_pc / repetition).clamp_(max=numbers.max)
    shaped_pc = torch.where(plain_pc > 0, less, plain_pc * repetition)
    shaped_pc -= frequency * (counts_pc - 1)
    shaped_pc -= presence * (counts_pc > 1)
    logits_tc.index_copy_(0, rows, torch.where(counts_pc > 0, shaped_pc, plain_pc))


def say_there(
    tokens_t: torch.Tensor, lists: Tensors, tails_nk: torch.Tensor, counts_nc: torch.Tensor
) -> None:
    """Notes the tokens, all of the vocabulary, that the step's rows have said."""
    if len(lists["tail_rows"]):
        seats = lists["tail_seats"]
        last = tokens_t.index_select(0, lists["tail_rows"])[:, None]
        tails_nk.index_copy_(0, seats, torch.cat((tails_nk[seats, 1:], last), 1))
    if len(lists["count_rows"]):
        at = lists["count_seats"] * counts_nc.shape[1]
        at += tokens_t.index_select(0, lists["count_rows"])
        flat = counts_nc.view(-1)
        flat.index_copy_(0, at, flat.index_select(0, at).clamp_(min=1) + 1)
