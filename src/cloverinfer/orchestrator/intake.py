"""What a request must be before the scheduler hears of it: tokens of the model, checked.

Knows the model's vocabulary and tokenizer; knows no cluster and no other request.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from ..core.errors import RequestError, check_text
from ..core.request import Request
from ..core.sampling import SamplingParams
from ..models import IncrementalDetokenizer, Tokenizer
from ..models.grammar import Grammars
from .grammars import as_grammar
from .text import TextStream


class Intake:
    """Usable from any thread. Raises ``RequestError`` naming the field that is wrong."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        seed: int,
        grammars: Grammars,
        max_model_len: int,
    ) -> None:
        """``max_model_len``: the longest prompt and output together, in tokens."""
        self.tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._grammars = grammars
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(seed)

    def tokens(self, prompt: str | list[int]) -> list[int]:
        """A prompt as checked token ids; takes long for a long text."""
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("this model has no tokenizer: pass token ids", "prompt")
            check_text(prompt)
            prompt = self.tokenizer.encode(prompt, most=self._max_model_len)
        elif not isinstance(prompt, (list, tuple)):
            kind = type(prompt).__name__
            raise RequestError(f"a prompt is a string or a list of token ids, not {kind}", "prompt")
        vocab = self._vocab_size
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        bad = next((t for t in prompt if type(t) is not int or not 0 <= t < vocab), None)
        if bad is not None:
            raise RequestError(f"token id {bad!r} is not in [0, {vocab})", "prompt")
        return list(prompt)  # the caller's list may change while the request lives

    def check(self, sampling: SamplingParams) -> None:
        """What depends on the model; takes long for a grammar that is large and new."""
        if sampling.structured_outputs is not None:
            self._grammars.compile(as_grammar(sampling.structured_outputs))
        for name in ("stop", "bad_words"):
            if getattr(sampling, name) and self.tokenizer is None:
                what = name.replace("_", " ").replace("stop", "stop strings")
                raise RequestError(f"{what} need a tokenizer, which this model lacks", name)
            for text in getattr(sampling, name):
                check_text(text, name)
        vocab = self._vocab_size
        bad = next((token for token in sampling.logit_bias or {} if token >= vocab), None)
        if bad is not None:
            raise RequestError(f"logit_bias: token id {bad} is not in [0, {vocab})", "logit_bias")
        if sampling.min_tokens and len(sampling.stop_token_ids) >= vocab:
            self._check_stops(sampling)

    def _check_stops(self, sampling: SamplingParams) -> None:
        stops = set(sampling.stop_token_ids)
        if all(token in stops for token in range(self._vocab_size)):
            raise RequestError(
                "stop_token_ids has every token, which leaves none for min_tokens", "stop_token_ids"
            )

    def request(
        self,
        number: int,
        request_id: str,
        token_ids: list[int],
        sampling: SamplingParams,
        arrival: float,
    ) -> Request:
        """A request of checked parts, with its seed."""
        seed = sampling.seed
        return Request(
            number,
            request_id,
            token_ids,
            sampling,
            arrival,
            seed=self._seeds.getrandbits(63) if seed is None else seed,
            eos_token_ids=self._eos_token_ids,
            bad_words=self._spellings(sampling.bad_words),
            prompt_logprobs=[] if sampling.prompt_logprobs is None else [None],
        )

    def text_stream(self, sampling: SamplingParams) -> TextStream:
        """The way from a request's tokens to its text."""
        skip = sampling.skip_special_tokens
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip) if self.tokenizer else None
        return TextStream(
            detokenizer,
            sampling.stop,
            keep_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def _spellings(self, words: Sequence[str]) -> list[list[int]]:
        """Each word's tokens as it stands at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in words:
            assert self.tokenizer is not None, "bad words are checked before"
            for text in (word, " " + word.lstrip()):
                tokens = self.tokenizer.encode(text, add_special_tokens=False)
                if tokens and tokens not in found:
                    found.append(tokens)
        return found
