"""Grammars compiled for a model's vocabulary, and how far each request has come in its own.

A state is a function of the grammar and of the tokens generated: any node can make it from what a
join carries. Compiled grammars are kept per process, so that nodes of one process share them.

Shapes: c vocabulary.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..core.errors import ModelError, RequestError
from ..core.structured import PARAM
from ..wire.messages import Grammar
from .resolve import ResolvedModel, load_tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_COMPILED = 256
"""Compiled grammars kept in a process and model, those used last."""
SLOW_SECONDS, MOST_SLOW = 0.05, 8
"""Computing time, and how often in a row finding what one request may say next may take it. All
rows of its step wait for that, and an ambiguous grammar only gets slower. The compiler's own limits
do not tell such a grammar from a wide one (a choice of a thousand texts), which is fast."""
_JSON_SPACE = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
"""Room for indentation, but no endless blanks."""
_MAX_ERROR = 300
_NO_TEXT = "it allows no text"


class GrammarState:
    """One request's place in its grammar."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._compiled = compiled
        self.reset()

    def reset(self) -> None:
        """Back to before the first generated token."""
        self._matcher = self._compiled.deep_copy()
        self.known = 0
        """Generated tokens that it has read."""
        self._slow = 0

    def read(self, tokens: Sequence[int]) -> None:
        """The next generated tokens, each exactly once."""
        self._matcher.consume_tokens(list(tokens))
        self.known += len(tokens)

    def allowed(self, size: int) -> npt.NDArray[np.bool_]:
        """bool ``[size]``: tokens that may come next; an end of sequence where it may end."""
        begun = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._slow = self._slow + 1 if time.thread_time() - begun > SLOW_SECONDS else 0
        mask = np.unpackbits(bits, bitorder="little", count=min(size, 8 * len(bits)))
        return np.pad(mask, (0, size - len(mask))).astype(np.bool_)

    @property
    def error(self) -> str:
        """Why it cannot go on (the compiler's limits were passed, say); empty while it can."""
        if self._matcher.is_error():
            reason = _short(self._matcher.get_error())
        elif self._slow >= MOST_SLOW:
            reason = (
                f"finding what may come next took over {1000 * SLOW_SECONDS:g} ms {MOST_SLOW} "
                "times in a row, for which other requests wait: make the grammar less ambiguous"
            )
        else:
            return ""
        return f"{PARAM}: cannot go on after {self.known} tokens: {reason}"


class Grammars:
    """Compiles for one vocabulary; usable from any thread."""

    def __init__(self, model: ResolvedModel) -> None:
        self._model = model
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """The grammar, compiled once; ``RequestError`` where it cannot be."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            tokenizer = self._load_tokenizer()
        compiled = _compile(grammar, tokenizer)  # may take long, and lets others go on
        with self._lock:
            self._compiled[grammar] = compiled
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def state(self, grammar: Grammar) -> GrammarState:
        """A new request's."""
        return GrammarState(self.compile(grammar))

    def _load_tokenizer(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            try:
                tokenizer = load_tokenizer(self._model)
            except ModelError as problem:
                raise RequestError(f"{PARAM} needs a tokenizer: {problem}", PARAM) from problem
            ends = list(self._model.eos_token_ids or tokenizer.eos_token_ids)
            if not ends:
                raise RequestError(f"{PARAM} needs a model with an end of sequence", PARAM)
            size = max(self._model.arch.vocab_size, tokenizer.vocab_size)
            self._tokenizer = LLTokenizer(tokenizer.serialized(), n_vocab=size, eos_token=ends)
        return self._tokenizer


_grammars: dict[str, Grammars] = {}
_grammars_lock = threading.Lock()


def grammars_of(model: ResolvedModel) -> Grammars:
    """The process's compiled grammars for this model."""
    key = f"{model.path}:{model.fingerprint}"
    with _grammars_lock:
        return _grammars.setdefault(key, Grammars(model))


def _compile(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(verbose_errors=False)
    try:
        compiled = LLMatcher(tokenizer, _source(grammar), log_level=0, limits=limits)
    except ValueError as problem:
        raise _refused(grammar, str(problem)) from problem
    _try_first_step(grammar, compiled)
    return compiled


def _try_first_step(grammar: Grammar, compiled: LLMatcher) -> None:
    """Shows what compiling does not: that it allows no text, or passes limits. Twice, since copies
    share what they have learnt, which counts against the limits of the next one."""
    for _ in range(2):
        if compiled.is_error():
            raise _refused(grammar, compiled.get_error())
        first = compiled.deep_copy()
        some = any(first.compute_bitmask())
        if first.is_error():
            raise _refused(grammar, first.get_error())
        if not some:
            raise _refused(grammar, _NO_TEXT)


def _source(grammar: Grammar) -> str:
    """In the compiler's own form; ``ValueError`` for what is none of its kind."""
    from llguidance import LLMatcher, grammar_from, regex_to_lark

    if grammar.kind == "json":
        return LLMatcher.grammar_from_json_schema(grammar.text, defaults=_JSON_SPACE)
    if grammar.kind == "regex":
        # \d is 0-9, as users of other servers expect, and not every script's digits.
        pattern = regex_to_lark(grammar.text, "d")
        return LLMatcher.grammar_from_lark(f"start: /{pattern}/")
    if grammar.kind == "choice":
        texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)]
        return LLMatcher.grammar_from_lark("start: " + " | ".join(texts))
    return str(grammar_from("grammar", grammar.text))


def _refused(grammar: Grammar, reason: str) -> RequestError:
    return RequestError(f"{PARAM}: this {grammar.kind} cannot be compiled: {_short(reason)}", PARAM)


def _short(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    if line == "NoExtensionBias":
        line = _NO_TEXT  # the compiler's word for it
    return line if len(line) <= _MAX_ERROR else line[: _MAX_ERROR - 3] + "..."
