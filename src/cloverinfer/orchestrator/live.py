"""A request under way as its client sees it: chunks of text and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

import msgspec

from ..core.errors import CloverError, RequestError, check_text
from ..core.logprobs import TokenLogprobs
from ..core.request import Request
from ..core.sampling import MOST, SamplingParams
from ..scheduler import TokenEvent
from .text import TextStream


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """What is new of a request."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    """On the last chunk: ``stop``, ``length``, ``abort`` or ``error``."""
    error: str | None = None
    error_code: str | None = None
    """``queue_timeout``: it found no place in time, and may be tried again."""
    metrics: dict[str, Any] | None = None
    """On the last chunk."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of ``token_ids``, where asked for."""
    stop_reason: int | str | None = None
    """On the last chunk: the stop string or stop token that ended it; None for an end of
    sequence."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """On the first chunk of a request that asks for them: one for each token of the prompt, None
    for the first."""
    index: int = 0
    """Which of the ``n`` sequences of the request it belongs to."""


@dataclass(frozen=True)
class RequestOptions:
    """What a request may say beside its prompt and sampling; checked on construction."""

    request_id: str | None = None
    """A name of the caller's; None: one is made."""
    priority: int = 0
    """Lower is served sooner."""
    cache_salt: str | None = None
    """Cached prefixes are shared with requests of the same salt only."""

    def __post_init__(self) -> None:
        for name in ("request_id", "cache_salt"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise RequestError(f"{name} must be a non-empty string, not {value!r}", name)
            if value is not None:
                check_text(value, name)
        if type(self.priority) is not int or abs(self.priority) > MOST:
            allowed = f"an integer from {-MOST} to {MOST}"
            raise RequestError(f"priority must be {allowed}, not {self.priority!r}", "priority")


Sink = Callable[[Union[Chunk, CloverError]], None]
"""Called by the engine's thread; an error is the last thing that comes."""


@dataclass(frozen=True)
class Ask:
    """A request before it is begun: text or token ids, and who hears of it."""

    prompt: str | list[int]
    sampling: SamplingParams
    sink: Sink
    options: RequestOptions | None = None


@dataclass(eq=False)
class Live:
    """A request and what of it has not been handed out yet."""

    request: Request
    sink: Sink
    stream: TextStream
    group: str
    """The name that its client knows it by; the same for all sequences of one prompt."""
    index: int = 0
    followers: list[Live] = field(default_factory=list)
    """Sequences of the same prompt that begin once this one has read it."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    _told_prompt: bool = False

    @property
    def decides(self) -> bool:
        """Whether what it says next may decide what is to be done: its text may end it, or others
        wait for its first token."""
        return self.stream.may_stop or bool(self.followers)

    def hear(self, event: TokenEvent) -> None:
        """Takes the next token."""
        self.token_ids.append(event.token)
        if event.logprobs is not None:
            self.logprobs.append(event.logprobs)
        # The token that ended it is not part of the text, unless asked for.
        keeps = self.request.sampling.include_stop_str_in_output
        if self.request.finish_reason != "stop" or keeps:
            self.text += self.stream.add([event.token])

    def chunk(self) -> Chunk:
        """All that has not been handed out."""
        return self._take()

    def end_as(self, other: Request) -> None:
        """Ends for the reason that another request ended for."""
        mine = self.request
        mine.finish_reason, mine.error = other.finish_reason, other.error
        mine.error_code = other.error_code

    def last_chunk(self, metrics: dict[str, Any]) -> Chunk:
        """The end of a request that is over."""
        request = self.request
        self.text += self.stream.flush()
        reason = request.finish_reason
        if reason == "length" and self.stream.stopped:
            reason = "stop"  # the last token that was allowed completed a stop string
        return msgspec.structs.replace(
            self._take(),
            finish_reason=reason,
            error=request.error,
            error_code=request.error_code,
            metrics=metrics,
            stop_reason=self._stop_reason() if reason == "stop" else None,
        )

    def _take(self) -> Chunk:
        sampling = self.request.sampling
        new = Chunk(
            self.text,
            self.token_ids,
            logprobs=self.logprobs if sampling.logprobs is not None else None,
            index=self.index,
            prompt_logprobs=(
                self._take_prompt_logprobs() if sampling.prompt_logprobs is not None else None
            ),
        )
        self.text, self.token_ids, self.logprobs = "", [], []
        return new

    def _take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Once, when they are whole."""
        request = self.request
        if len(request.prompt_logprobs) != request.num_prompt or self._told_prompt:
            return None
        self._told_prompt = True
        return request.prompt_logprobs

    def _stop_reason(self) -> int | str | None:
        if self.stream.stopped:
            return self.stream.stopped_by
        token = self.request.output_token_ids[-1]
        return token if token in self.request.sampling.stop_token_ids else None
