"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from .errors import RequestError
from .structured import StructuredOutputs, as_structured

MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 256
MAX_TAIL = 16
"""Last tokens of a request that a device keeps, to know a forbidden word before its last token."""
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
_LISTS = ("stop", "stop_token_ids", "bad_words")
MOST = 2**31 - 1
"""Largest count or token id."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request; checked on construction (``RequestError``).

    ``docs/sampling.md`` says in which order they take effect.
    """

    n: int = 1
    """Sequences to generate from the prompt, 1 to 128."""
    max_tokens: int = 128
    """Most tokens to generate; 0 reads the prompt only (for ``prompt_logprobs``, say)."""
    min_tokens: int = 0
    """No end of sequence, stop token or stop string before this many tokens."""
    temperature: float = 1.0
    """0 is greedy; higher is more varied. In [0, 100]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 (or -1) keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability, in [0, 1]."""
    seed: int | None = None
    """Makes sampled tokens repeatable; None draws a fresh seed per request. In [-2^63, 2^63)."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token generated before, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time it was generated before, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies negative ones, of tokens in prompt or output. In
    (0, 100]; above 1 discourages them."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, each in [-100, 100]."""
    bad_words: tuple[str, ...] = ()
    """Texts that are not generated: the token that would complete one is never chosen."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; they are not part of the text. One string
    stands for itself; None, as in ``stop_token_ids`` and ``bad_words``, for none."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these tokens."""
    include_stop_str_in_output: bool = False
    """The text ends with the stop string (or stop token) that ended it."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of each generated token and of this many likeliest ones, 0 to 20."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt but the first. The prompt is computed in full, whatever
    of it is cached."""

    structured_outputs: StructuredOutputs | None = None
    """What the text must look like. It then ends where it is complete, ``ignore_eos`` or not."""

    def __post_init__(self) -> None:
        put = msgspec.structs.force_setattr
        for name in _LISTS:
            if getattr(self, name) is None:  # as clients of other servers give it
                put(self, name, ())
        if isinstance(self.stop, str):
            put(self, "stop", (self.stop,))
        for name, good, allowed in _RULES:
            value = getattr(self, name)
            if not good(value):
                raise RequestError(f"{name} must be {allowed}, not {value!r}", name)
        for name in _LISTS:
            put(self, name, tuple(getattr(self, name)))
        if self.structured_outputs is not None:
            put(self, "structured_outputs", as_structured(self.structured_outputs))
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}",
                "min_tokens",
            )

    def each(self) -> list[SamplingParams]:
        """The parameters of each of the ``n`` sequences: that of index i has the seed plus i, and
        the first alone asks about the prompt."""
        if self.n == 1:
            return [self]
        seeds = [None if self.seed is None else _wrapped(self.seed + i) for i in range(self.n)]
        first, *others = (msgspec.structs.replace(self, n=1, seed=seed) for seed in seeds)
        return [first, *(msgspec.structs.replace(one, prompt_logprobs=None) for one in others)]

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def shapes_logits(self) -> bool:
        """Something other than temperature, top-k, top-p and min-p changes what is likely."""
        return bool(self.needs_history or self.logit_bias or self.min_tokens)

    @property
    def needs_history(self) -> bool:
        """What shapes the logits depends on the tokens before."""
        return bool(self.penalises or self.bad_words or self.structured_outputs is not None)

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


def fits_tail(words: Iterable[Sequence[int]]) -> bool:
    """Whether ``MAX_TAIL`` tokens tell that the next one would complete one of the words."""
    return all(len(word) <= MAX_TAIL + 1 for word in words)


def _wrapped(seed: int) -> int:
    """Kept in 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    if isinstance(value, bool):
        return False
    # An int may be too large for isfinite, and is finite anyway.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: _is_int(value) and least <= value <= most


def _real(least: float, most: float) -> Callable[[Any], bool]:
    return lambda value: _is_real(value) and least <= value <= most


def _share(value: Any) -> bool:
    return _is_real(value) and 0 < value <= 1


def _strings(most: int) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, (list, tuple))
        and len(value) <= most
        and all(isinstance(one, str) and one for one in value)
    )


def _token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(_is_int(t) and 0 <= t <= MOST for t in value)


def _biases(value: Any) -> bool:
    bias = _real(-100, 100)
    return (
        isinstance(value, dict)
        and len(value) <= MAX_LOGIT_BIASES
        and all(_is_int(t) and 0 <= t <= MOST and bias(by) for t, by in value.items())
    )


def _or_none(good: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or good(value)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", _whole(1, MAX_N), f"an integer from 1 to {MAX_N}"),
    ("max_tokens", _whole(0, MOST), f"an integer from 0 to {MOST}"),
    ("min_tokens", _whole(0, MOST), "an integer from 0 to max_tokens"),
    ("temperature", _real(0, 100), "a number in [0, 100]"),
    ("top_k", _whole(-1, MOST), f"an integer from 0 (all) to {MOST}"),
    ("top_p", _share, "a number in (0, 1]"),
    ("min_p", _real(0, 1), "a number in [0, 1]"),
    ("seed", _or_none(_whole(-(2**63), 2**63 - 1)), "a 64-bit integer"),
    ("presence_penalty", _real(-2, 2), "a number in [-2, 2]"),
    ("frequency_penalty", _real(-2, 2), "a number in [-2, 2]"),
    (
        "repetition_penalty",
        lambda value: _is_real(value) and 0 < value <= 100,
        "a number in (0, 100]",
    ),
    (
        "logit_bias",
        _or_none(_biases),
        f"at most {MAX_LOGIT_BIASES} token ids, each with a number in [-100, 100]",
    ),
    ("bad_words", _strings(MAX_BAD_WORDS), f"at most {MAX_BAD_WORDS} non-empty strings"),
    ("stop", _strings(MAX_STOP_STRINGS), f"at most {MAX_STOP_STRINGS} non-empty strings"),
    ("stop_token_ids", _token_ids, "a list of token ids"),
    ("include_stop_str_in_output", _is_flag, "true or false"),
    ("ignore_eos", _is_flag, "true or false"),
    ("skip_special_tokens", _is_flag, "true or false"),
    ("logprobs", _or_none(_whole(0, MAX_LOGPROBS)), f"an integer from 0 to {MAX_LOGPROBS}"),
    ("prompt_logprobs", _or_none(_whole(0, MAX_LOGPROBS)), f"an integer from 0 to {MAX_LOGPROBS}"),
)
"""Each parameter with what makes a value good, and how that is said."""
