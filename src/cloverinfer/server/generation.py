"""Completions and chats: a body becomes a job for an engine, and its chunks an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ..core.errors import (
    CloverError,
    EngineClosedError,
    PromptTooLongError,
    RequestError,
    check_text,
)
from ..core.sampling import SamplingParams
from .asked import STRUCTURE, need, renamed
from .catalog import Catalog, Model
from .chat import ChatRequest, NamedChoice
from .door import Door, Record, record_of
from .engine import Chunk, Tokenizer
from .errors import ApiError, classify
from .logprobs import Speller
from .protocol import Body, CompletionRequest
from .render import ChatForm, Choice, CompletionForm, Form, Piece, usage_of
from .streams import DONE, Batch, ClientGoneError, EventStream, event, fan_in
from .tools import ToolParser, create_parser
from .tools.forced import NamedParser, RequiredParser, required_schema

CLIENT_CLOSED_REQUEST = 499
LONG_TEXT = 2000
"""Characters whose tokenization takes about as long as a detour through a thread."""
MOST_ANSWERS = 1024
"""Prompts times choices of one request."""


@dataclass
class Job:
    """What one HTTP request asks of an engine, and the form of the answer."""

    model: Model
    form: Form
    choices: list[Choice]
    per_prompt: int
    sampling: SamplingParams
    body: Body
    record: Record
    prompt_name: str
    """The parameter that the prompt stands in."""

    def usage(self) -> dict[str, Any]:
        return usage_of(self.choices, self.per_prompt)

    def index(self, stream: int, chunk: Chunk) -> int:
        """Which choice a chunk of the stream of a prompt belongs to."""
        return stream * self.per_prompt + chunk.index

    def tell_prompt(self, stream: int, chunk: Chunk) -> range:
        """The engine tells of a prompt once; all answers to it, whose indices are returned, tell
        the same."""
        indices = range(stream * self.per_prompt, (stream + 1) * self.per_prompt)
        for index in indices:
            self.choices[index].prompt_logprobs = chunk.prompt_logprobs
        return indices

    def renamed(self, error: CloverError) -> CloverError:
        """The same error about the parameter that the client knows."""
        if not isinstance(error, RequestError):
            return error
        names = {"prompt": self.prompt_name, STRUCTURE: self.body.structure_name()}
        return renamed(error, names)

    def note(self, finish: str | None = None) -> None:
        """Tells the log how far it came."""
        usage = self.usage()
        reasons = sorted({one.finish_reason for one in self.choices if one.finish_reason})
        self.record.model = self.model.name
        self.record.prompt_tokens = usage["prompt_tokens"]
        self.record.completion_tokens = usage["completion_tokens"]
        self.record.finish = finish or ",".join(reasons) or "-"


class Generation:
    """The handlers of both endpoints."""

    def __init__(self, catalog: Catalog, door: Door) -> None:
        self._catalog = catalog
        self._door = door

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        model = self._catalog.find(body.model)
        body.check()
        limit = body.token_limit()
        scored = bool(body.echo) and body.logprobs is not None
        if limit == 0 and not body.echo and body.prompt_logprobs is None:
            raise RequestError("max_tokens must be at least 1, or 0 with echo", "max_tokens")
        sampling = body.sampling(limit)
        if scored and body.prompt_logprobs is None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=body.logprobs)
        prompts = body.prompts()
        if len(prompts) * body.choices > MOST_ANSWERS:
            raise RequestError(f"at most {MOST_ANSWERS} answers (prompts times n)", "n")
        choices = []
        for prompt in prompts:
            tokens = await self._tokens(model, prompt, body)
            _check_length(model, len(tokens), "prompt", room=min(limit, 1))
            echo = _echo(model, prompt, tokens, body) if body.echo else ""
            for _ in range(body.choices):
                choices.append(_choice(body, tokens, echo))
                choices[-1].scored = scored
        form = CompletionForm(body.model or model.name, Speller(model.engine.tokenizer))
        record = record_of(request.scope)
        job = Job(model, form, choices, body.choices, sampling, body, record, "prompt")
        if limit == 0 and sampling.prompt_logprobs is None:
            return _echoed(job)
        return await self._answer(job, request)

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        model = self._catalog.find(body.model)
        body.check()
        prompt = await chat_tokens(model, body, _most(model, body))
        _check_length(model, len(prompt), "messages", room=1)
        limit = body.token_limit()
        if limit is None:
            limit = model.engine.max_model_len - len(prompt)
        if limit == 0:
            raise RequestError("a chat's max_tokens must be at least 1", "max_tokens")
        structure = _tool_structure(body)
        parsers = [_tool_parser(model, body) for _ in range(body.choices)]
        sampling = body.sampling(limit, structure)
        if parsers[0] is not None and parsers[0].keeps_special_tokens:
            need("skip_special_tokens", "tools")
            sampling = msgspec.structs.replace(sampling, skip_special_tokens=False)
        choices = [_choice(body, prompt, parser=parser) for parser in parsers]
        for choice in choices:
            choice.one_call = body.parallel_tool_calls is False
        form = ChatForm(body.model or model.name, Speller(model.engine.tokenizer))
        record = record_of(request.scope)
        job = Job(model, form, choices, body.choices, sampling, body, record, "messages")
        return await self._answer(job, request)

    async def _tokens(self, model: Model, prompt: str | list[int], body: Body) -> list[int]:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            prompt = await encode(model, prompt, special, _most(model, body))
        if not prompt:
            raise RequestError("the prompt is empty", "prompt")
        return prompt[-(body.truncate_prompt_tokens or 0) :]

    async def _answer(self, job: Job, request: Request) -> Response:
        try:
            return await self._run(job, request)
        except RequestError as error:
            raise job.renamed(error) from error

    async def _run(self, job: Job, request: Request) -> Response:
        engine, body = job.model.engine, job.body
        if engine.failure is not None:
            raise EngineClosedError(engine.failure)
        job.note()
        streams = [
            engine.stream(
                choice.prompt,
                job.sampling,
                f"{job.form.id}-{index}",
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
            )
            for index, choice in enumerate(job.choices[:: job.per_prompt])
        ]
        chunks = fan_in(request.receive, streams, self._door.cut)
        try:
            if not body.stream:
                return await _whole(job, chunks)
            # The first chunk is awaited here: a request refused by the engine gets its status.
            first = await anext(chunks)
            _raise_failed(first[0][1])
        except ClientGoneError:
            job.note("disconnect")
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            job.note("error")
            await chunks.aclose()  # the other choices' streams end with it
            raise
        return EventStream(_events(job, first, chunks))


def _check_length(model: Model, count: int, param: str, room: int) -> None:
    most = model.engine.max_model_len
    if count + room > most:
        raise PromptTooLongError.of(f"{count} tokens", most, param)


def _most(model: Model, body: Body) -> int | None:
    """Tokens beyond which a prompt need not be read to the end; None where it will be cut."""
    return None if body.truncate_prompt_tokens else model.engine.max_model_len


def tokenizer_of(model: Model, param: str) -> Tokenizer:
    tokenizer = model.engine.tokenizer
    if tokenizer is None:
        raise RequestError(f"{model.name} has no tokenizer: give prompts as token ids", param)
    return tokenizer


async def encode(
    model: Model, text: str, add_special_tokens: bool = True, most: int | None = None
) -> list[int]:
    """Tokens of ``text``; in a thread where that takes long, for the streams of others.

    ``PromptTooLongError`` at once where they are surely more than ``most``.
    """
    tokenizer = tokenizer_of(model, "prompt")
    check_text(text)
    if len(text) <= LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens, most)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens, most)


async def chat_tokens(model: Model, body: ChatRequest, most: int | None = None) -> list[int]:
    """The prompt that the chat template makes of a body, as tokens; ``most`` as for ``encode``."""
    tokenizer = model.engine.tokenizer
    if tokenizer is None or not (tokenizer.has_chat_template or model.chat.template):
        raise RequestError(f"{model.name} has no chat template; use /v1/completions", "messages")
    messages = body.plain_messages()
    try:
        tokens = await asyncio.to_thread(  # a long chat must not stall the streams of others
            tokenizer.chat_token_ids,
            messages,
            body.opens_answer,
            bool(body.continue_final_message),
            model.chat.template,
            body.template_variables(),
            most,
        )
    except PromptTooLongError as error:
        raise renamed(error, {"prompt": "messages"}) from error
    if not tokens:
        raise RequestError("the chat template makes an empty prompt of this", "messages")
    return tokens[-(body.truncate_prompt_tokens or 0) :]


def _echo(model: Model, prompt: str | list[int], tokens: list[int], body: Body) -> str:
    whole = isinstance(prompt, str) and body.truncate_prompt_tokens is None
    return str(prompt) if whole else decode(model, tokens, "echo")


def decode(model: Model, tokens: list[int], param: str) -> str:
    tokenizer = tokenizer_of(model, param)
    bad = next((one for one in tokens if not 0 <= one < tokenizer.vocab_size), None)
    if bad is not None:
        raise RequestError(f"token id {bad} is not in [0, {tokenizer.vocab_size})", "prompt")
    return tokenizer.decode(tokens)


def _choice(
    body: Body, prompt: list[int], echo: str = "", parser: ToolParser | None = None
) -> Choice:
    return Choice(
        prompt,
        echo,
        parser,
        with_logprobs=body.logprobs_wanted() is not None,
        with_token_ids=bool(body.return_token_ids),
    )


# -- tools


def _tool_structure(body: ChatRequest) -> dict[str, Any] | None:
    """What the answer must look like for the sake of ``tool_choice``."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools or choice in (None, "none", "auto"):
        return None
    need(STRUCTURE, "tool_choice")
    if isinstance(choice, NamedChoice):
        chosen = next(t.function for t in tools if t.function.name == choice.function.name)
        return {"json": chosen.parameters or {"type": "object"}}
    one = body.parallel_tool_calls is False
    return {"json": required_schema([tool.function for tool in tools], one)}


def _tool_parser(model: Model, body: ChatRequest) -> ToolParser | None:
    """A fresh one for one answer; None where no calls are looked for."""
    if not body.tools or body.tool_choice == "none":
        return None
    if isinstance(body.tool_choice, NamedChoice):
        return NamedParser(body.tool_choice.function.name)
    if body.tool_choice == "required":
        return RequiredParser()
    if not model.chat.auto_tools or model.chat.tool_call_parser is None:
        raise RequestError(
            'tools with tool_choice "auto" need a server started with --enable-auto-tool-choice '
            "and --tool-call-parser",
            "tool_choice",
        )
    return create_parser(model.chat.tool_call_parser)


# -- answers


def _echoed(job: Job) -> Response:
    """Nothing is generated: the prompt is the answer."""
    for choice in job.choices:
        choice.begin()
        choice.finish_reason = "length"
    job.note()
    if not job.body.stream:
        return JSONResponse(job.form.whole(job.choices, job.usage()))

    async def events() -> AsyncGenerator[bytes, None]:
        for index, choice in enumerate(job.choices):
            # Not an opening, which an empty text (of special tokens) has none of.
            yield event(_with_usage(job, job.form.event(index, Piece(choice.echo, "length"))))
        if job.body.include_usage:
            yield event(job.form.usage_event(job.usage()))
        yield DONE

    return EventStream(events())


async def _whole(job: Job, chunks: AsyncGenerator[Batch, None]) -> Response:
    try:
        for choice in job.choices:
            choice.begin()
        async for batch in chunks:
            for stream, chunk in batch:
                _raise_failed(chunk)
                if chunk.prompt_logprobs is not None:
                    job.tell_prompt(stream, chunk)
                job.choices[job.index(stream, chunk)].add(chunk)
    finally:
        await chunks.aclose()
    job.note()
    return JSONResponse(job.form.whole(job.choices, job.usage()))


def _raise_failed(chunk: Chunk) -> None:
    if chunk.finish_reason in ("error", "abort"):
        raise ApiError.of_failed(chunk.error, chunk.error_code)


def _with_usage(job: Job, body: dict[str, Any]) -> dict[str, Any]:
    if job.body.continuous_usage:
        body["usage"] = job.usage()
    elif job.body.include_usage:
        body["usage"] = None
    return body


async def _events(
    job: Job, first: Batch, chunks: AsyncGenerator[Batch, None]
) -> AsyncGenerator[bytes, None]:
    """The stream's events, those that are ready at once in one piece. One that fails half-way ends
    in an error event and nothing after it."""
    form, finish = job.form, "disconnect"
    try:
        for data in _openings(job, range(len(job.choices))):
            yield data
        async for batch in _chain(first, chunks):
            data, failed = _batch_events(job, batch)
            if data:
                yield data
            if failed:
                finish = "error"
                return
        finish = ""
    except CloverError as error:
        finish = "error"
        yield event(classify(job.renamed(error))[1])
        return
    finally:
        job.note(finish or None)
        await chunks.aclose()
    if job.body.include_usage:
        yield event(form.usage_event(job.usage()))
    yield DONE


def _openings(job: Job, indices: range) -> Iterator[bytes]:
    """What answers begin with, of those that can begin."""
    for index in indices:
        opening = job.form.opening(index, job.choices[index])
        if opening is not None:
            yield event(_with_usage(job, opening))


def _batch_events(job: Job, batch: Batch) -> tuple[bytes, bool]:
    """The events of some chunks; and whether the last one tells of a failure."""
    events: list[bytes] = []
    for stream, chunk in batch:
        if chunk.finish_reason in ("error", "abort"):
            failed = ApiError.of_failed(chunk.error, chunk.error_code)
            return b"".join([*events, event(failed.body)]), True
        if chunk.prompt_logprobs is not None:
            events += _openings(job, job.tell_prompt(stream, chunk))
        index = job.index(stream, chunk)
        piece = job.choices[index].add(chunk)
        if not piece.empty:
            events.append(event(_with_usage(job, job.form.event(index, piece))))
    return b"".join(events), False


async def _chain(first: Batch, rest: AsyncGenerator[Batch, None]) -> AsyncGenerator[Batch, None]:
    yield first
    async for batch in rest:
        yield batch
