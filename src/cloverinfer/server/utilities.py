"""What is not generation: models, tokenization, health, readiness, the cluster."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field

from .. import __version__
from ..core.errors import RequestError
from .catalog import Catalog, Model
from .chat import ChatMessage, ChatRequest, Tool
from .door import Door
from .errors import RETRY_AFTER, ApiError, error_body
from .generation import chat_tokens, decode, encode, tokenizer_of
from .protocol import STRICT


class TokenizeRequest(BaseModel):
    """A prompt, or the messages of a chat."""

    model_config = STRICT
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    model_config = STRICT
    model: str | None = None
    tokens: list[int] = Field(max_length=10**7)


class Utilities:
    """The handlers."""

    def __init__(self, catalog: Catalog, door: Door) -> None:
        self._catalog = catalog
        self._door = door

    async def health(self) -> JSONResponse:
        """Whether the server can serve anything at all."""
        failures = [one.engine.failure for one in self._catalog.models]
        if all(failure is not None for failure in failures):
            reason = "; ".join(str(failure) for failure in failures)
            return JSONResponse(error_body(reason, "service_unavailable"), 503)
        return JSONResponse({"status": "ok"})

    async def ready(self) -> JSONResponse:
        """Whether every model can be served: every role has a live node."""
        problems = ["the server is shutting down"] if self._door.draining else []
        for model in self._catalog.models:
            problems += [f"{model.name}: {problem}" for problem in _problems(model)]
        if problems:
            body = error_body("; ".join(problems), "service_unavailable", code="not_ready")
            return JSONResponse(body, 503, {"Retry-After": RETRY_AFTER})
        return JSONResponse({"status": "ready"})

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def cluster(self) -> dict[str, Any]:
        """Nodes of every model: where they are and what they did."""
        return {"object": "cluster", "models": [_cluster(one) for one in self._catalog.models]}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": list(self._catalog.cards())}

    async def model(self, name: str) -> dict[str, Any]:
        return self._catalog.card(name)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        model = self._catalog.find(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("give either prompt or messages", "prompt")
        if body.prompt is not None:
            tokens = await encode(model, body.prompt, body.add_special_tokens is not False)
        else:
            tokens = await chat_tokens(model, _as_chat(body, model))
        answer = {"count": len(tokens), "max_model_len": model.engine.max_model_len}
        strings = None
        if body.return_token_strs:
            tokenizer = tokenizer_of(model, "return_token_strs")
            strings = [tokenizer.id_to_token(one) for one in tokens]
        return {**answer, "tokens": tokens, "token_strs": strings}

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
        model = self._catalog.find(body.model)
        try:
            return {"prompt": decode(model, body.tokens, "tokens")}
        except RequestError as error:
            raise RequestError(str(error), "tokens") from error

    async def no_adapters(self) -> None:
        message = "LoRA adapters are not supported by this server"
        raise ApiError(400, message, "invalid_request_error", code="unsupported")


def _as_chat(body: TokenizeRequest, model: Model) -> ChatRequest:
    """The chat whose prompt is asked for; checked as one."""
    own = {"prompt", "return_token_strs", "model", "messages", "tools"}
    fields = {name: getattr(body, name) for name in type(body).model_fields if name not in own}
    chat = ChatRequest.model_construct(**fields)
    chat.model, chat.messages, chat.tools = model.name, body.messages or [], body.tools
    chat.check()
    return chat


def _problems(model: Model) -> list[str]:
    failure = model.engine.failure
    if failure is not None:
        return [failure]
    alive: dict[str, bool] = {}
    for node in model.engine.nodes():
        role = node["role"]
        alive[role] = alive.get(role, False) or node.get("alive", True)
    return [f"no {role} node is alive" for role, one in alive.items() if not one]


def _cluster(model: Model) -> dict[str, Any]:
    engine = model.engine
    known = {"name": model.name, "names": list(model.names), "failure": engine.failure}
    return {**known, **engine.cluster_info()}
