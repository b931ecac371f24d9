"""Answers in OpenAI's forms: whole ones and the events of a stream."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from .engine import Chunk


@dataclass
class Choice:
    """One prompt's answer as far as it has come."""

    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.completion_tokens += len(chunk.token_ids)
        if chunk.finish_reason is not None:
            self.finish_reason = chunk.finish_reason
            self.prompt_tokens = (chunk.metrics or {}).get("prompt_tokens", 0)


class Form(ABC):
    """The shape of one endpoint's answers."""

    prefix: str
    whole_object: str
    event_object: str

    def __init__(self, model: str) -> None:
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.model = model

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        body = self._envelope(self.whole_object)
        body["choices"] = [self._choice(i, choice) for i, choice in enumerate(choices)]
        body["usage"] = usage(choices)
        return body

    def opening(self, index: int, text: str) -> dict[str, Any] | None:
        """What a choice's stream begins with, if anything."""
        return self.event(index, text, None) if text else None

    def event(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        body = self._envelope(self.event_object)
        choice = {"index": index, "logprobs": None, "finish_reason": finish_reason}
        body["choices"] = [{**choice, **self._delta(text)}]
        return body

    def usage_event(self, choices: list[Choice]) -> dict[str, Any]:
        return {**self._envelope(self.event_object), "choices": [], "usage": usage(choices)}

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    @abstractmethod
    def _choice(self, index: int, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _delta(self, text: str) -> dict[str, Any]: ...


class CompletionForm(Form):
    prefix = "cmpl"
    whole_object = event_object = "text_completion"

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "text": choice.text,
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatForm(Form):
    prefix = "chatcmpl"
    whole_object = "chat.completion"
    event_object = "chat.completion.chunk"

    def opening(self, index: int, text: str) -> dict[str, Any]:
        body = self.event(index, text, None)
        body["choices"][0]["delta"] = {"role": "assistant", "content": text}
        return body

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
        }

    def _delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


def usage(choices: list[Choice]) -> dict[str, int]:
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.completion_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


@dataclass
class Job:
    """What one HTTP request asks of the engine, and the form of the answer."""

    form: Form
    prompts: list[str | list[int]]
    openings: list[str]
    """Text that each choice begins with (the prompt, where it is echoed)."""
    choices: list[Choice] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Choice(text=text) for text in self.openings]
