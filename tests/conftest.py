"""What every test starts from: fixed seeds, and no settings from the caller's environment.

Beside them a fake engine, which the commands and the server are tested with.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import random
import sys
import time
import types
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from cloverinfer.config.load import SECTIONS
from cloverinfer.core.errors import (
    EngineClosedError,
    PromptTooLongError,
    RequestError,
    check_text,
)
from cloverinfer.core.logprobs import TokenLogprobs
from cloverinfer.orchestrator.counters import Counters, EngineStats

SETTINGS = tuple(f"CLOVER_{section.upper()}_" for section in SECTIONS)


settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Small tensors gain nothing from torch's threads, and wait for them on a busy machine."""
    import torch  # not every test has it

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(SETTINGS)]:
        monkeypatch.delenv(variable)
    random.seed(0)
    np.random.seed(0)
    # Most tests never load torch, and should not pay for it here.
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(autouse=True)
def _quiet_requests() -> Iterator[None]:
    """``serve`` in this process has requests logged to the standard error of its own test."""
    log = logging.getLogger("cloverinfer.requests")
    before = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.level, log.propagate = before


@dataclass(frozen=True)
class FakeChunk:
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    metrics: dict[str, Any] | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: int | str | None = None
    index: int = 0
    error_code: str | None = None


class FakeTokenizer:
    """A token is a word; ids are positions in the list of words met so far."""

    has_chat_template = True
    vocab_size = 10**6
    longest = 100
    """Characters of a word."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.template: str | None = None
        self.variables: dict[str, Any] = {}
        self.messages: list[dict[str, Any]] = []
        self.ends = False
        """Whether a chat's prompt shows how it ends."""

    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]:
        text.encode()  # which no tokenizer does for what is no Unicode
        if most is not None and len(text) > most * self.longest:
            raise PromptTooLongError.of(f"{len(text)} characters", most)
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
        return [self.words.index(word) for word in text.split()]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return " ".join(self.words[i] for i in token_ids if i < len(self.words))

    def id_to_token(self, token_id: int) -> str | None:
        return self.words[token_id] if token_id < len(self.words) else None

    def token_bytes(self, token_id: int) -> bytes:
        """That of an answer's token; number 3 is no whole character."""
        return b"\xf0\x9f" if token_id == 3 else f"w{token_id} ".encode()

    def chat_token_ids(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        variables: dict[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]:
        self.template, self.variables = template, variables or {}
        self.messages = messages
        text = " ".join(f"{one['role']}: {one['content']}" for one in messages)
        check_text(text + json.dumps(self.variables, ensure_ascii=False), "messages")
        end = "" if continue_final else " assistant:" if add_generation_prompt else " end"
        return self.encode(text + (end if self.ends else ""), most=most)


class FakeEngine:
    """An engine that answers `w0 w1 w2 ...`, and remembers what it was asked and told."""

    model_name = "fake"
    max_model_len = 32

    def __init__(self, model: Any = None, cluster: Any = None, progress: Any = None) -> None:
        self.model, self.cluster = model, cluster
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.failure: str | None = None
        self.refusal: Exception | None = None
        self.delay = 0.0
        self.pieces: list[str] | None = None
        """What it answers, where that is not `w0 w1 w2 ...`."""
        self.alive = {"dense": True}
        self.fail_at: int | None = None
        self.error_code: str | None = None
        self.raise_at: int | None = None
        self.raised: Exception = EngineClosedError("the engine was closed")
        self.counters = Counters()
        self.asked: list[tuple[Any, Any]] = []
        self.aborted = 0
        self.closed = 0
        if progress is not None:
            progress("nodes are ready")

    def nodes(self) -> list[dict[str, Any]]:
        row = {"pid": 1, "tokens": 3, "bytes_in": 3 * 2**19}
        roles = self.alive.items()
        return [{"name": f"{role}-0", "role": role, "alive": one, **row} for role, one in roles]

    def stats(self) -> EngineStats:
        return EngineStats(self.counters, len(self.asked), 2, 1, {"attention-0": (3, 12)})

    def cluster_info(self) -> dict[str, Any]:
        transport = {"name": "inproc", "passed_over": [], "checksum": "none"}
        return {"transport": transport, "nodes": self.nodes()}

    def close(self) -> None:
        self.closed += 1

    def stream_sync(self, prompt: Any, sampling: Any) -> Iterator[FakeChunk]:
        total = self._check(prompt, sampling)
        over = False
        try:
            for i in range(total):
                time.sleep(self.delay)
                chunk = self._chunk(i, total, prompt)
                over = chunk.finish_reason is not None
                yield chunk
                if over:
                    return
        finally:
            self.aborted += not over

    async def stream(
        self,
        prompt: Any,
        sampling: Any,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncIterator[FakeChunk]:
        total = self._check(prompt, sampling)
        self.options = (priority, cache_salt)
        left = sampling.n
        try:
            if total == 0:
                left = 0
                scores = [None, *self._scores(prompt, sampling)[1:]]
                yield FakeChunk("", [], "length", prompt_logprobs=scores)
            for i in range(total):
                await asyncio.sleep(self.delay)
                for index in range(sampling.n):
                    chunk = self._chunk(i, total, prompt, index)
                    if i == index == 0 and sampling.prompt_logprobs is not None:
                        scores = [None, *self._scores(prompt, sampling)[1:]]
                        chunk = dataclasses.replace(chunk, prompt_logprobs=scores)
                    left -= chunk.finish_reason is not None
                    yield chunk
                if left == 0:
                    return
        finally:
            self.aborted += left > 0

    def _check(self, prompt: Any, sampling: Any) -> int:
        self.asked.append((prompt, sampling))
        for text in (*sampling.stop, *sampling.bad_words):
            check_text(text, "stop")
        if self.refusal is not None:
            raise self.refusal
        length = self._length(prompt)
        if length >= self.max_model_len:
            raise RequestError(f"{length} tokens where {self.max_model_len} fit", "prompt")
        return len(self.pieces) if self.pieces is not None else sampling.max_tokens

    def _scores(self, prompt: Any, sampling: Any) -> list[TokenLogprobs]:
        return [TokenLogprobs(one, -0.25, 1, [one, 3], [-0.25, -2.0]) for one in prompt]

    def _length(self, prompt: Any) -> int:
        return len(prompt.split() if isinstance(prompt, str) else prompt)

    def _chunk(self, i: int, total: int, prompt: Any, index: int = 0) -> FakeChunk:
        if i == self.raise_at:
            raise self.raised
        if i == self.fail_at:
            return FakeChunk(
                "", [], "error", "a node died", index=index, error_code=self.error_code
            )
        last = i == total - 1
        metrics = {"prompt_tokens": self._length(prompt), "ttft": 0.5, "stages": {"queue": 0.25}}
        text = f"w{i} " if self.pieces is None else self.pieces[i]
        reason = None if not last else "length" if self.pieces is None else "stop"
        scores = [TokenLogprobs(i, -0.5, 1, [i, i + 1], [-0.5, -1.5])]
        return FakeChunk(text, [i], reason, None, metrics if last else None, scores, index=index)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def engines(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The engines that commands made; the class is that of the fake."""
    made: list[Any] = []

    def make(*arguments: Any) -> Any:
        made.append(type(engine)(*arguments))
        return made[-1]

    module = types.ModuleType("cloverinfer.orchestrator.llm")
    module.AsyncLLM = make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cloverinfer.orchestrator.llm", module)
    return made
