"""The front door: what every request passes before it is read and after it was answered.

Request ids, the API key, the size of bodies, draining, and a log line at the end. It knows HTTP
and nothing of what a body means.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config import ServerConfig
from .errors import RETRY_AFTER, error_body, own_path

log = logging.getLogger("cloverinfer.requests")
OPEN = frozenset(
    {"/health", "/ready", "/version", "/metrics", "/docs", "/redoc", "/openapi.json", "/ping"}
)
"""Paths that need no key, are answered while draining, and are not logged."""
BODIES = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass
class Record:
    """What is told of a request in the log."""

    id: str
    model: str = "-"
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish: str = "-"
    status: int = 0
    started: float = field(default_factory=time.monotonic)


def record_of(scope: Scope) -> Record:
    """The record of the request under way."""
    record = scope.get("state", {}).get("record")
    return record if isinstance(record, Record) else Record("-")


class Door:
    """Whether requests are let in, and how many are inside."""

    def __init__(self, patience: float) -> None:
        """``patience``: seconds that requests may go on once the server was told to stop."""
        self._patience = patience
        self._deadline: float | None = None
        self.inside = 0
        self.cut = asyncio.Event()
        """Set when the time is up: what is still under way ends with an error."""

    @property
    def draining(self) -> bool:
        return self._deadline is not None

    def drain(self) -> None:
        """No new requests from now on; a second call ends those under way at once."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._patience
        else:
            self._deadline = time.monotonic()

    def drained(self) -> bool:
        """Whether the server may stop; cuts off what has had its time."""
        if self._deadline is None:
            return False
        if self.inside and time.monotonic() < self._deadline:
            return False
        self.cut.set()
        return True


class FrontDoor:
    """ASGI middleware."""

    def __init__(self, app: ASGIApp, settings: ServerConfig, door: Door) -> None:
        self._app = app
        self._keys = tuple(f"Bearer {key}".encode() for key in settings.api_key)
        self._most = int(settings.max_body_mib * 2**20)
        self._body_timeout = settings.body_timeout
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = Record(_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                mark = (b"x-request-id", record.id.encode())
                message = {**message, "headers": [*message.get("headers", ()), mark]}
            await send(message)

        if own_path(scope) in OPEN:
            await self._app(scope, receive, answer)
            return
        self._door.inside += 1
        try:
            await self._admit(scope, receive, answer)
        finally:
            self._door.inside -= 1
            if log.isEnabledFor(logging.INFO):
                log.info("%s", _line(scope, record))

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None and scope["method"] in BODIES:
            try:
                whole = await asyncio.wait_for(self._body(receive), self._body_timeout)
            except asyncio.TimeoutError:
                message = f"the body did not arrive within {self._body_timeout:g} seconds"
                refusal = _last(408, message, "invalid_request_error", "request_timeout")
            except _TooLargeError:
                refusal = self._too_large()
            else:
                if whole is None:
                    return  # the client left
                receive = _replayed(whole, receive)
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        if self._keys and not _has_key(headers, self._keys):
            kind, code = "authentication_error", "invalid_api_key"
            more = {"WWW-Authenticate": "Bearer"}
            return _last(401, "missing or wrong API key", kind, code, more)
        if self._door.draining:
            text = "the server is shutting down"
            return _last(503, text, "service_unavailable", "draining", {"Retry-After": RETRY_AFTER})
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._most:
            return self._too_large()
        return None

    def _too_large(self) -> JSONResponse:
        message = f"the body is larger than {self._most} bytes (server.max_body_mib)"
        return _last(413, message, "invalid_request_error", "request_too_large")

    async def _body(self, receive: Receive) -> bytes | None:
        """The whole body; None where the client left before it was."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._most:
                raise _TooLargeError
            if not message.get("more_body", False):
                return b"".join(parts)


class _TooLargeError(Exception):
    pass


def _replayed(whole: bytes, rest: Receive) -> Receive:
    """The body in one message, then what comes after it: the client's leaving."""
    told = False

    async def receive() -> Message:
        nonlocal told
        if told:
            return await rest()
        told = True
        return {"type": "http.request", "body": whole, "more_body": False}

    return receive


def _request_id(headers: Headers) -> str:
    """The client's, where it is fit for a header and a log; else a new one."""
    given = headers.get("x-request-id", "")
    return given if _ID.fullmatch(given) else uuid.uuid4().hex


def _has_key(headers: Headers, keys: Sequence[bytes]) -> bool:
    given = headers.get("authorization", "").encode("latin-1")
    # All are compared, each in constant time: how long it takes tells nothing.
    return sum(hmac.compare_digest(given, key) for key in keys) > 0


def _last(
    status: int, message: str, kind: str, code: str, more: dict[str, str] | None = None
) -> JSONResponse:
    """A refusal, after which the connection closes: the rest of the body is not read."""
    headers = {"Connection": "close", **(more or {})}
    return JSONResponse(error_body(message, kind, code=code), status, headers)


def _line(scope: Scope, record: Record) -> str:
    seconds = time.monotonic() - record.started
    # A path is the client's text: what is not printable must not reach a terminal.
    path = scope["path"].encode("unicode_escape").decode()[:200]
    return (
        f"{record.id} {scope['method']} {path} {record.status or 499} model={record.model} "
        f"prompt_tokens={record.prompt_tokens} completion_tokens={record.completion_tokens} "
        f"finish={record.finish} seconds={seconds:.3f}"
    )


def cors_options(settings: ServerConfig) -> dict[str, Any]:
    """What lets pages of other origins in, where the settings name any."""
    return {
        "allow_origins": list(settings.allowed_origins),
        "allow_methods": list(settings.allowed_methods),
        "allow_headers": list(settings.allowed_headers),
        "allow_credentials": settings.allow_credentials,
        "expose_headers": ["X-Request-Id", "Retry-After"],
    }
