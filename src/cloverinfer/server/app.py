"""The routes. A handler turns a body into a job for the engine and its chunks into an answer."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from .. import __version__
from ..core.errors import CloverError, EngineClosedError, RequestError, check_text
from ..core.sampling import SamplingParams
from .engine import Chunk, Engine
from .errors import ApiError, classify, error_body, install_handlers
from .protocol import COMPLETION_MAX_TOKENS, ChatRequest, CompletionRequest
from .render import ChatForm, CompletionForm, Job
from .streams import DONE, ClientGoneError, EventStream, event, fan_in

CLIENT_CLOSED_REQUEST = 499


def build_app(
    engine: Engine, served_model_name: str | None = None, api_key: str | None = None
) -> FastAPI:
    """The application over a running engine, which it neither starts nor closes.

    ``api_key``: where set, ``/v1`` asks for it as a bearer token.
    """
    app = FastAPI(title="CloverInfer", version=__version__)
    install_handlers(app)
    api = Api(engine, served_model_name or engine.model_name, api_key)
    guarded = APIRouter(prefix="/v1", dependencies=[Depends(api.check_key)])
    guarded.add_api_route("/models", api.models, methods=["GET"])
    guarded.add_api_route("/models/{name:path}", api.model, methods=["GET"])
    guarded.add_api_route("/completions", api.completions, methods=["POST"], response_model=None)
    guarded.add_api_route("/chat/completions", api.chat, methods=["POST"], response_model=None)
    app.include_router(guarded)
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/version", api.version, methods=["GET"])
    return app


class Api:
    """The handlers, with what they share."""

    def __init__(self, engine: Engine, name: str, api_key: str | None) -> None:
        self.engine = engine
        self.name = name
        self.api_key = api_key

    async def check_key(self, request: Request) -> None:
        if self.api_key is None:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.api_key}".encode()):
            message = "missing or wrong API key"
            raise ApiError(401, message, "authentication_error", code="invalid_api_key")

    async def health(self) -> JSONResponse:
        failure = self.engine.failure
        if failure is not None:
            return JSONResponse(error_body(failure, "service_unavailable"), 503)
        return JSONResponse({"status": "ok"})

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._model_card()]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        return self._model_card()

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        self._check_model(body.model)
        body.check()
        limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = body.sampling(limit)
        prompts = body.prompts()
        openings = [self._as_text(one) if body.echo else "" for one in prompts]
        job = Job(CompletionForm(self.name), prompts, openings)
        return await self._answer(job, sampling, request, bool(body.stream), body.include_usage)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        self._check_model(body.model)
        body.check()
        tokenizer = self.engine.tokenizer
        if tokenizer is None or not tokenizer.has_chat_template:
            raise RequestError(f"{self.name} has no chat template; use /v1/completions", "messages")
        # In a thread: a long conversation must not stall the streams of others.
        messages = body.plain_messages()
        for message in messages:
            check_text(message["content"])
        prompt = await asyncio.to_thread(tokenizer.chat_token_ids, messages)
        limit = body.token_limit()
        if limit is None:
            # A prompt that leaves no room is refused by the engine, which knows the numbers.
            limit = max(1, self.engine.max_model_len - len(prompt))
        job = Job(ChatForm(self.name), [prompt], [""])
        sampling = body.sampling(limit)
        return await self._answer(job, sampling, request, bool(body.stream), body.include_usage)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} does not exist; this server has {self.name!r}"
            raise ApiError(404, message, "invalid_request_error", "model", "model_not_found")

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "cloverinfer",
            "max_model_len": self.engine.max_model_len,
        }

    def _as_text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise RequestError(f"{self.name} has no tokenizer to echo token ids with", "echo")
        bad = next((one for one in prompt if not 0 <= one < tokenizer.vocab_size), None)
        if bad is not None:
            raise RequestError(f"token id {bad} is not in [0, {tokenizer.vocab_size})", "prompt")
        return tokenizer.decode(prompt)

    async def _answer(
        self, job: Job, sampling: SamplingParams, request: Request, stream: bool, with_usage: bool
    ) -> Response:
        if self.engine.failure is not None:
            raise EngineClosedError(self.engine.failure)
        streams = [
            self.engine.stream(prompt, sampling, f"{job.form.id}-{index}")
            for index, prompt in enumerate(job.prompts)
        ]
        chunks = fan_in(request.receive, streams)
        try:
            if not stream:
                return await _whole(job, chunks)
            # The first chunk is awaited here: a request refused by the engine gets its status.
            first = await anext(chunks)
            _raise_failed(first[1])
        except ClientGoneError:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            await chunks.aclose()  # the other prompts' streams end with it
            raise
        return EventStream(_events(job, first, chunks, with_usage))


async def _whole(job: Job, chunks: AsyncGenerator[tuple[int, Chunk], None]) -> Response:
    try:
        async for index, chunk in chunks:
            _raise_failed(chunk)
            job.choices[index].add(chunk)
    finally:
        await chunks.aclose()
    return JSONResponse(job.form.whole(job.choices))


def _raise_failed(chunk: Chunk) -> None:
    if chunk.finish_reason in ("error", "abort"):
        raise ApiError(500, _failure(chunk), "server_error", code="generation_failed")


def _failure(chunk: Chunk) -> str:
    return chunk.error or "the request was aborted before it finished"


async def _events(
    job: Job,
    first: tuple[int, Chunk],
    chunks: AsyncGenerator[tuple[int, Chunk], None],
    with_usage: bool,
) -> AsyncGenerator[bytes, None]:
    """The stream's events. One that fails half-way ends in an error event and nothing after it."""
    extra = {"usage": None} if with_usage else {}
    try:
        for index, text in enumerate(job.openings):
            opening = job.form.opening(index, text)
            if opening is not None:
                yield event({**opening, **extra})
        async for index, chunk in _chain(first, chunks):
            if chunk.finish_reason in ("error", "abort"):
                yield event(error_body(_failure(chunk), "server_error", code="generation_failed"))
                return
            job.choices[index].add(chunk)
            if chunk.text or chunk.finish_reason is not None:
                yield event({**job.form.event(index, chunk.text, chunk.finish_reason), **extra})
    except CloverError as error:
        yield event(classify(error)[1])
        return
    finally:
        await chunks.aclose()
    if with_usage:
        yield event(job.form.usage_event(job.choices))
    yield DONE


async def _chain(
    first: tuple[int, Chunk], rest: AsyncGenerator[tuple[int, Chunk], None]
) -> AsyncGenerator[tuple[int, Chunk], None]:
    yield first
    async for item in rest:
        yield item
