"""Sends completions and chats to an OpenAI-compatible server and notes when each piece came.

It reads of an answer only what is measured. The time of a piece is that of the read that brought
it: two events in one read have one time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from ..core.errors import ConfigError
from .names import ENDPOINTS
from .records import Record, Sample
from .runner import Clock
from .workloads import Tokenizer

LONGEST_ERROR = 300


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Text(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def any(self) -> bool:
        return bool(self.content or self.reasoning_content or self.reasoning or self.tool_calls)


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Text | None = None
    message: _Text | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        part = self.delta or self.message
        return self.text or (part.content if part is not None else None) or ""

    @property
    def any(self) -> bool:
        part = self.delta or self.message
        return bool(self.text) or (part is not None and part.any)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True)
class Target:
    """The server, and what every request asks of it."""

    base_url: str
    """As ``address`` makes it: without a slash at its end."""
    model: str
    backend: str = "openai"
    endpoint: str | None = None
    """Path; None is the backend's own."""
    stream: bool = True
    timeout: float = 600.0
    """Seconds that one request may take."""
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.backend not in ENDPOINTS:
            raise ConfigError(f"--backend must be one of {', '.join(ENDPOINTS)}")

    @property
    def url(self) -> str:
        return self.base_url + (self.endpoint or ENDPOINTS[self.backend])

    def body(self, sample: Sample) -> bytes:
        asked: dict[str, Any] = {"model": self.model, "max_tokens": sample.output_tokens}
        if self.backend == "openai-chat":
            if not isinstance(sample.prompt, str):
                raise ConfigError("chats take text: leave --prompt-form ids away")
            asked["messages"] = [{"role": "user", "content": sample.prompt}]
        else:
            asked["prompt"] = sample.prompt
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(asked | dict(self.extra_body))


class HttpSender:
    """One session for all requests; connections are kept as long as the server keeps them."""

    def __init__(
        self, session: aiohttp.ClientSession, target: Target, tokenizer: Tokenizer | None = None
    ) -> None:
        self._session = session
        self._target = target
        self._tokenizer = tokenizer
        self._timeout = aiohttp.ClientTimeout(total=target.timeout)

    async def send(self, sample: Sample, record: Record, now: Clock) -> None:
        """The boundary where whatever goes wrong with a server becomes a failed request."""
        answer = _Answer(record)
        body = self._target.body(sample)
        headers = {"Content-Type": "application/json", **self._target.headers}
        try:
            async with self._session.post(
                self._target.url, data=body, headers=headers, timeout=self._timeout
            ) as response:
                record.status = response.status
                if response.status != 200:
                    record.error = _refused(response.status, await response.text())
                elif response.content_type == "text/event-stream":
                    await _read(response.content, answer, now)
                    answer.close(ended=answer.done or record.finish_reason is not None)
                else:
                    answer.take(_decoder.decode(await response.read()), now())
                    record.times.clear()  # when its tokens were made, a whole answer does not say
        except asyncio.TimeoutError:
            record.error = f"no answer within {self._target.timeout:g} s"
        except (aiohttp.ClientError, OSError, msgspec.MsgspecError) as error:
            record.error = f"{type(error).__name__}: {error}"[:LONGEST_ERROR]
        record.ended = now()
        if record.ok and record.times:
            record.ended = max(record.times[-1], answer.finished)
        answer.count(self._tokenizer)


class _Answer:
    """What a stream has told so far."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.done = False
        self.finished = 0.0
        self._usage: _Usage | None = None
        self._text: list[str] = []

    def take(self, event: _Event, time: float) -> None:
        if event.error is not None:
            text = msgspec.json.encode(event.error).decode()
            self.record.error = f"error in the answer: {text}"[:LONGEST_ERROR]
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            if choice.any:
                self.record.times.append(time)
                self._text.append(choice.words)
            if choice.finish_reason is not None:
                self.record.finish_reason, self.finished = choice.finish_reason, time

    def close(self, ended: bool) -> None:
        if not ended and self.record.ok:
            self.record.error = "the stream ended before the answer did"

    def count(self, tokenizer: Tokenizer | None) -> None:
        record = self.record
        if self._usage is not None:
            record.output_tokens = self._usage.completion_tokens
            record.prompt_tokens = self._usage.prompt_tokens
        elif tokenizer is not None:
            text = "".join(self._text)
            record.output_tokens = len(tokenizer.encode(text, add_special_tokens=False))
            record.tokens_from = "tokenizer"
        else:
            record.output_tokens, record.tokens_from = len(record.times), "pieces"


async def _read(content: aiohttp.StreamReader, answer: _Answer, now: Clock) -> None:
    rest = b""
    async for data in content.iter_any():
        time = now()
        events, rest = _split(rest + data)
        for event in events:
            if event == b"[DONE]":
                answer.done = True
            else:
                answer.take(_decoder.decode(event), time)


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """The data of whole events, and the beginning of the next."""
    whole, end, rest = data.replace(b"\r\n", b"\n").rpartition(b"\n\n")
    return (list(_data(whole)) if end else []), rest


def _data(whole: bytes) -> Iterator[bytes]:
    # Comments (pings) and fields other than data are passed over.
    for line in whole.split(b"\n"):
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _refused(status: int, text: str) -> str:
    try:
        text = str(msgspec.json.decode(text.encode())["error"]["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        text = text.strip() or "no body"
    return f"HTTP {status}: {text}"[:LONGEST_ERROR]


def session() -> aiohttp.ClientSession:
    """Without a limit of connections of its own; made on the running loop."""
    connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=300)
    return aiohttp.ClientSession(connector=connector, auto_decompress=True, read_bufsize=1 << 18)


def address(given: str) -> str:
    """The server's base address from HOST:PORT or a URL, with or without the ``/v1`` at its end."""
    url = given if "://" in given else f"http://{given}"
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def authorization(key: str | None = None) -> dict[str, str]:
    """The header of a bearer token; without a key that of ``OPENAI_API_KEY``, where it is set."""
    key = key or os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def wait_ready(
    http: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str], seconds: float
) -> list[str]:
    """The names of the server's models, once it answers. ``ConfigError`` when it does not."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    url = f"{base_url}/v1/models"
    while True:
        try:
            timeout = aiohttp.ClientTimeout(total=max(1.0, seconds))
            async with http.get(url, headers=headers, timeout=timeout) as response:
                if response.status == 200:
                    rows = msgspec.json.decode(await response.read())["data"]
                    return [str(row["id"]) for row in rows]
                problem = _refused(response.status, await response.text())
                if response.status in (401, 403):
                    raise ConfigError(f"{url}: {problem}: give --api-key or OPENAI_API_KEY")
        except aiohttp.InvalidURL as error:
            raise ConfigError(
                f"{base_url!r} is no address of a server: HOST:PORT or URL"
            ) from error
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            problem = str(error) or type(error).__name__
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ConfigError(f"{url} is no OpenAI-compatible server: {error}") from error
        if loop.time() > deadline:
            raise ConfigError(f"{url} does not answer: {problem}; is the server running?")
        await asyncio.sleep(0.2)
