"""Answers in OpenAI's forms: whole ones and the events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.logprobs import TokenLogprobs
from .engine import Chunk
from .logprobs import CompletionLogprobs, Speller, chat_logprobs, prompt_logprobs
from .tools import ToolDelta, ToolParser


@dataclass
class Piece:
    """What is new of a choice."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: Sequence[TokenLogprobs | None] | None = None
    calls: list[ToolDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        shown = self.text or self.calls or self.logprobs or self.token_ids or self.finish_reason
        return not shown


@dataclass
class Choice:
    """One answer as far as it has come."""

    prompt: list[int]
    echo: str = ""
    """Text that it begins with: the prompt's, where that is echoed."""
    parser: ToolParser | None = None
    one_call: bool = False
    """Only the first call counts (``parallel_tool_calls: false``)."""
    scored: bool = False
    """The echo comes with the log-probabilities of the prompt, which the engine must tell first."""
    with_logprobs: bool = False
    with_token_ids: bool = False
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    calls: list[ToolDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """A whole answer begins with what is echoed; in a stream that is an event of its own."""
        self.text = self.echo

    def add(self, chunk: Chunk) -> Piece:
        """Takes in a chunk and returns what of it a stream shows."""
        piece = Piece(chunk.text, chunk.finish_reason, chunk.stop_reason)
        if self.with_logprobs:
            piece.logprobs = chunk.logprobs or []
            self.logprobs += piece.logprobs
        if self.with_token_ids:
            piece.token_ids = list(chunk.token_ids)
            self.token_ids += piece.token_ids
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.cached_tokens = (chunk.metrics or {}).get("cached_tokens", 0)
        if self.parser is not None:
            self._parse(self.parser, piece)
        self.text += piece.text
        self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
        return piece

    def _parse(self, parser: ToolParser, piece: Piece) -> None:
        parsed = parser.add(piece.text)
        piece.text, piece.calls = parsed.content, parsed.calls
        if piece.finish_reason is not None:
            rest = parser.flush()
            piece.text += rest.content
            piece.calls += rest.calls
        if self.one_call:
            piece.calls = [call for call in piece.calls if call.index == 0]
        if piece.finish_reason == "stop" and parser.called:
            piece.finish_reason = "tool_calls"
        self.calls += piece.calls


class Form(ABC):
    """The shape of one endpoint's answers."""

    prefix: str
    whole_object: str
    event_object: str

    def __init__(self, model: str, speller: Speller) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.speller = speller

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        body = self._envelope(self.whole_object)
        body["choices"] = [self._choice(i, choice) for i, choice in enumerate(choices)]
        body["usage"] = usage
        return body

    @abstractmethod
    def opening(self, index: int, choice: Choice) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""

    def event(self, index: int, piece: Piece) -> dict[str, Any]:
        body = self._envelope(self.event_object)
        choice = {
            "index": index,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            **self._delta(index, piece),
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if piece.token_ids:
            choice["token_ids"] = piece.token_ids
        body["choices"] = [choice]
        return body

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._envelope(self.event_object), "choices": [], "usage": usage}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _extras(self, choice: Choice) -> dict[str, Any]:
        """What vLLM adds to OpenAI's fields of a choice."""
        extras: dict[str, Any] = {"stop_reason": choice.stop_reason}
        if choice.with_token_ids:
            extras["token_ids"] = choice.token_ids
        return extras

    def _of_prompt(self, choice: Choice) -> dict[str, Any]:
        """What it adds of the prompt: to each choice of a completion, to a chat as a whole."""
        extras: dict[str, Any] = {}
        if choice.with_token_ids:
            extras["prompt_token_ids"] = choice.prompt
        if choice.prompt_logprobs is not None:
            extras["prompt_logprobs"] = prompt_logprobs(choice.prompt_logprobs, self.speller)
        return extras

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, index: int, piece: Piece) -> dict[str, Any]: ...


class CompletionForm(Form):
    prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def __init__(self, model: str, speller: Speller) -> None:
        super().__init__(model, speller)
        self._scores: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int, choice: Choice) -> dict[str, Any] | None:
        piece = Piece(choice.echo)
        if choice.scored:
            if choice.prompt_logprobs is None:
                return None
            self._scores[index] = CompletionLogprobs(self.speller, choice.prompt[0])
            piece.logprobs = choice.prompt_logprobs
        elif not choice.echo and not choice.with_token_ids:
            return None
        body = self.event(index, piece)
        if choice.with_token_ids:
            body["choices"][0] |= {"prompt_token_ids": choice.prompt, "token_ids": []}
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        records = choice.logprobs
        if choice.scored and choice.prompt_logprobs is not None:
            records = [*choice.prompt_logprobs, *records]
        scores = None
        if choice.with_logprobs:
            scores = CompletionLogprobs(self.speller, choice.prompt[0]).piece(records)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": scores,
            "finish_reason": choice.finish_reason,
            **self._extras(choice),
            **self._of_prompt(choice),
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        if piece.logprobs is None:
            return {"text": piece.text}
        scores = self._scores.setdefault(index, CompletionLogprobs(self.speller))
        return {"text": piece.text, "logprobs": scores.piece(piece.logprobs)}


class ChatForm(Form):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {**super().whole(choices, usage), **self._of_prompt(choices[0])}

    def opening(self, index: int, choice: Choice) -> dict[str, Any]:
        body = self.event(index, Piece())
        body["choices"][0]["delta"] = {"role": "assistant", "content": ""}
        return {**body, **self._of_prompt(choice)} if index == 0 else body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text or (None if choice.calls else ""),
            "refusal": None,
        }
        if choice.calls:
            message["tool_calls"] = whole_calls(choice.calls)
        records = [one for one in choice.logprobs if one is not None]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(records, self.speller) if choice.with_logprobs else None,
            "finish_reason": choice.finish_reason,
            **self._extras(choice),
        }

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if piece.calls:
            delta["tool_calls"] = [call.as_delta() for call in piece.calls]
        if piece.logprobs is None:
            return {"delta": delta}
        records = [one for one in piece.logprobs if one is not None]
        return {"delta": delta, "logprobs": chat_logprobs(records, self.speller)}


def whole_calls(deltas: Sequence[ToolDelta]) -> list[dict[str, Any]]:
    """Calls as a message has them, of their pieces."""
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.name is not None:
            function = {"name": delta.name, "arguments": ""}
            calls[delta.index] = {"id": delta.id, "type": "function", "function": function}
        calls[delta.index]["function"]["arguments"] += delta.arguments
    return list(calls.values())


def usage_of(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Tokens so far; ``per_prompt`` choices share a prompt, which counts once."""
    prompt = sum(len(choice.prompt) for choice in choices[::per_prompt])
    cached = sum(choice.cached_tokens for choice in choices[::per_prompt])
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
