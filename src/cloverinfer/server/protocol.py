"""Request bodies after the OpenAI specification, and what the engine is asked on their behalf.

A parameter that would change the output but is not implemented is refused by name unless it has
its neutral value; one that would not (``user``, ``metadata``, ...) is read and left aside.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..core.errors import RequestError
from ..core.sampling import SamplingParams

COMPLETION_MAX_TOKENS = 16
"""What a completion that does not say gets, by the specification."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "web_search_options": (),
    "tool_calls": ([],),
}
"""Parameters not implemented, with the values (beside null) that ask for nothing."""
_STRICT = ConfigDict(extra="forbid", strict=True)


def _refuse_unsupported(body: BaseModel) -> None:
    for name in type(body).model_fields:
        value = getattr(body, name)
        if name not in NEUTRAL or value is None:
            continue
        # 1 == True in Python, so types are compared too; 0 and 0.0 are alike.
        alike = (
            value == one and isinstance(value, bool) == isinstance(one, bool)
            for one in NEUTRAL[name]
        )
        if not any(alike):
            raise RequestError(f"{name}={value!r} is not supported", name)


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Body(BaseModel):
    """What both endpoints take."""

    model_config = _STRICT
    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    n: Any = None
    logprobs: Any = None
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None

    def check(self) -> None:
        """Raises ``RequestError`` for what types alone do not show."""
        _refuse_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream", "stream_options")

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self, max_tokens: int) -> SamplingParams:
        """Raises ``RequestError`` naming the parameter that is out of range."""
        given = {
            name: getattr(self, name)
            for name in ("temperature", "top_p", "top_k", "seed", "stop_token_ids", "ignore_eos")
            if getattr(self, name) is not None
        }
        if self.stop:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        return SamplingParams(max_tokens=max_tokens, **given)


TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(_Body):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    best_of: Any = None
    suffix: Any = None

    def prompts(self) -> list[str | list[int]]:
        """One per choice, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [[one for one in self.prompt if isinstance(one, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class ContentPart(BaseModel):
    model_config = _STRICT
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """Null fields that answers carry are taken back, so a client may append what it got."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart]
    name: str | None = None
    refusal: None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None
    tool_calls: Any = None

    @model_validator(mode="after")
    def _supported(self) -> ChatMessage:
        try:
            _refuse_unsupported(self)
        except RequestError as error:
            raise ValueError(str(error)) from error
        return self

    def plain(self) -> dict[str, str]:
        """What a chat template reads."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": content}


class ChatRequest(_Body):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    web_search_options: Any = None

    def plain_messages(self) -> list[dict[str, str]]:
        if not self.messages:
            raise RequestError("messages must not be empty", "messages")
        return [message.plain() for message in self.messages]

    def token_limit(self) -> int | None:
        """``max_completion_tokens``, else ``max_tokens``."""
        limit = self.max_completion_tokens
        return self.max_tokens if limit is None else limit
