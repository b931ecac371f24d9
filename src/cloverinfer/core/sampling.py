"""How the tokens of one request are chosen and when it ends."""

from __future__ import annotations

import math

import msgspec

from .errors import RequestError

MAX_STOP_STRINGS = 64
MAX_LOGPROBS = 20
MOST = 2**31 - 1
"""Largest count or token id."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling parameters of one request; checked on construction (``RequestError``)."""

    max_tokens: int = 128
    """Most tokens to generate, at least 1."""
    temperature: float = 1.0
    """0 is greedy; higher is more varied. In [0, 100]."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 (or -1) keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p, in (0, 1]."""
    seed: int | None = None
    """Makes sampled tokens repeatable; None draws a fresh seed per request. In [-2^63, 2^63)."""
    stop: tuple[str, ...] = ()
    """Generation ends before the first of these strings; they are not part of the text."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends at any of these tokens."""
    ignore_eos: bool = False
    """Go on past the model's end-of-sequence tokens."""
    logprobs: int | None = None
    """Log-probabilities of each generated token and of this many likeliest ones, 0 to 20."""

    def __post_init__(self) -> None:
        self._check(
            "max_tokens",
            _is_int(self.max_tokens) and 1 <= self.max_tokens <= MOST,
            f"an integer from 1 to {MOST}",
        )
        self._check(
            "temperature",
            _is_real(self.temperature) and 0 <= self.temperature <= 100,
            "a number in [0, 100]",
        )
        self._check(
            "top_k",
            _is_int(self.top_k) and -1 <= self.top_k <= MOST,
            f"an integer from 0 (all) to {MOST}",
        )
        self._check("top_p", _is_real(self.top_p) and 0 < self.top_p <= 1, "a number in (0, 1]")
        self._check(
            "seed",
            self.seed is None or (_is_int(self.seed) and -(2**63) <= self.seed < 2**63),
            "a 64-bit integer",
        )
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._check(
            "stop",
            isinstance(stop, (list, tuple))
            and len(stop) <= MAX_STOP_STRINGS
            and all(isinstance(s, str) and s for s in stop),
            f"at most {MAX_STOP_STRINGS} non-empty strings",
        )
        ids = self.stop_token_ids
        self._check(
            "stop_token_ids",
            isinstance(ids, (list, tuple)) and all(_is_int(t) and 0 <= t <= MOST for t in ids),
            "a list of token ids",
        )
        self._check(
            "logprobs",
            self.logprobs is None
            or (_is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS),
            f"an integer from 0 to {MAX_LOGPROBS}",
        )
        msgspec.structs.force_setattr(self, "stop", tuple(stop))
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def _check(self, name: str, good: bool, allowed: str) -> None:
        if not good:
            raise RequestError(f"{name} must be {allowed}, not {getattr(self, name)!r}", name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    if isinstance(value, bool):
        return False
    # An int may be too large for isfinite, and is finite anyway.
    return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
