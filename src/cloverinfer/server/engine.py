"""What the server and the commands ask of an engine; ``AsyncLLM`` is one, tests bring another."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from ..core.logprobs import TokenLogprobs
from ..core.sampling import SamplingParams
from ..orchestrator.counters import EngineStats


class Chunk(Protocol):
    """A piece of an answer, in order; the last one has a finish reason."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def error(self) -> str | None: ...
    @property
    def error_code(self) -> str | None: ...
    @property
    def metrics(self) -> dict[str, Any] | None: ...
    @property
    def logprobs(self) -> list[TokenLogprobs] | None: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def index(self) -> int:
        """Which of the request's ``n`` sequences it belongs to."""


class Tokenizer(Protocol):
    @property
    def has_chat_template(self) -> bool: ...
    @property
    def vocab_size(self) -> int: ...
    def encode(
        self, text: str, add_special_tokens: bool = True, most: int | None = None
    ) -> list[int]: ...
    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...
    def id_to_token(self, token_id: int) -> str | None: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def chat_token_ids(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        most: int | None = None,
    ) -> list[int]: ...


class Engine(Protocol):
    """Usable from any event loop; closing a stream aborts its request."""

    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def failure(self) -> str | None: ...

    def nodes(self) -> list[dict[str, Any]]: ...
    def cluster_info(self) -> dict[str, Any]: ...
    def stats(self) -> EngineStats: ...
    def stream(
        self,
        prompt: str | list[int],
        sampling: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """An async generator, so that it can be closed."""

    def close(self) -> None: ...
