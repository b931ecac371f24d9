"""How likely a model found a token: the record that nodes report and users are given."""

from __future__ import annotations

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """One token beside the likeliest ones in its place.

    Natural logarithms of the model's own distribution: before temperature, penalties, biases and
    grammars, float32.
    """

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token; how many are likelier, plus one."""
    top_ids: list[int]
    """The likeliest tokens, likeliest first, as many as were asked for."""
    top_logprobs: list[float]
