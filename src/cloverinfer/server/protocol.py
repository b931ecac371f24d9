"""Request bodies after the OpenAI specification: what both endpoints take, and completions.

A parameter that would change the output but is not implemented is refused by name unless it has
its neutral value; one that would not (``user``, ``metadata``, ...) is read and left aside. Beside
OpenAI's parameters stand those that vLLM adds, under its names.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..core.errors import RequestError
from ..core.sampling import SamplingParams
from .asked import STRUCTURE, refuse_unsupported, renamed, sampling_of, structure_of

COMPLETION_MAX_TOKENS = 16
"""What a completion that does not say gets, by the specification."""
MOST_CHOICES = 128
MOST_PROMPTS = 1024
STRICT = ConfigDict(extra="forbid", strict=True)


class StreamOptions(BaseModel):
    model_config = STRICT
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(BaseModel):
    model_config = STRICT
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    model_config = STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(BaseModel):
    model_config = STRICT
    json_: str | dict[str, Any] | None = Field(
        default=None, alias="json", serialization_alias="json"
    )
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return super().model_dump(**{"by_alias": True, **options})


class Body(BaseModel):
    """What both endpoints take."""

    model_config = STRICT
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    response_format: ResponseFormat | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    use_beam_search: Any = None
    logits_processors: Any = None
    lora_request: Any = None

    def check(self) -> None:
        """Raises ``RequestError`` for what types alone do not show."""
        refuse_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is only allowed with stream", "stream_options")
        _in_range("n", self.n, 1, MOST_CHOICES)
        _in_range("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, 2**31)
        if self.prompt_logprobs is not None:
            if self.stream:
                raise RequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")
            # Others read -1 as the whole vocabulary, which nobody should be sent.
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)

    @property
    def choices(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def sampling(self, max_tokens: int, structure: dict[str, Any] | None = None) -> SamplingParams:
        """Raises ``RequestError`` naming the parameter that is out of range.

        ``structure``: what the answer must look like where the body does not say it itself.
        """
        more = {
            "logprobs": self.logprobs_wanted(),
            "prompt_logprobs": self.prompt_logprobs,
            STRUCTURE: structure or structure_of(self)[1],
        }
        try:
            return sampling_of(self, max_tokens, more)
        except RequestError as error:
            raise renamed(error, {STRUCTURE: self.structure_name()}) from error

    def structure_name(self) -> str:
        """The parameter that says what the answer must look like."""
        return structure_of(self)[0]

    def logprobs_wanted(self) -> int | None:
        """Likeliest tokens to report beside each generated one; None: no log-probabilities."""
        raise NotImplementedError


MOST_LOGPROBS = 20
"""Likeliest tokens that may be asked for."""


def _in_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} must be an integer from {low} to {high}, not {value}", name)


TokenId = Annotated[int, Field(ge=0)]


class CompletionRequest(Body):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        super().check()
        _in_range("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        if self.best_of not in (None, self.choices):
            raise RequestError("best_of other than n is not supported by this server", "best_of")

    def logprobs_wanted(self) -> int | None:
        return self.logprobs

    def token_limit(self) -> int:
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self) -> list[str | list[int]]:
        """As text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", "prompt")
        if isinstance(self.prompt[0], int):
            return [[one for one in self.prompt if isinstance(one, int)]]
        if len(self.prompt) > MOST_PROMPTS:
            raise RequestError(f"prompt: at most {MOST_PROMPTS} in one request", "prompt")
        return [one for one in self.prompt if not isinstance(one, int)]
