"""Errors in OpenAI's form: which exception is which status, and what the body says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from ..core.errors import (
    CloverError,
    EngineClosedError,
    NodeDiedError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)
from ..core.request import QUEUE_TIMEOUT

log = logging.getLogger(__name__)
RETRY_AFTER = "1"
"""Seconds that a client should wait when the queue is full or the server is not ready."""
UNSERVED = {
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "reranking",
    "/v1/score": "scoring",
    "/v1/images": "images",
    "/v1/audio": "audio",
    "/v1/videos": "videos",
    "/v1/responses": "the responses API; use /v1/chat/completions",
    "/v1/moderations": "moderations",
    "/v1/files": "files",
    "/v1/uploads": "uploads",
    "/v1/batches": "batches as files; send requests at the same time",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/vector_stores": "vector stores",
    "/v1/realtime": "the realtime API",
    "/v1/messages": "the messages API; use /v1/chat/completions",
}
"""Parts of the API that other servers have, with what is told of them."""

WITHOUT_PREFIX = frozenset({"/chat/completions", "/completions", "/models"})
"""Paths that clients ask for whose base address lacks ``/v1``."""


class ApiError(Exception):
    """An answer of the API's own making (authentication, unknown model, failed generation)."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param, code)

    @classmethod
    def of_failed(cls, reason: str | None, code: str | None) -> ApiError:
        """A generation that ended with an error: ``code``, where known, is of ``core.request``."""
        reason = reason or "the request was aborted before it finished"
        if code == QUEUE_TIMEOUT:
            return cls(503, reason, "service_unavailable", code=code)
        return cls(500, reason, "server_error", code="generation_failed")


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    # A message may quote what a client sent, which need not be text that can be sent back.
    shown = {"message": _sendable(message), "param": param if param is None else _sendable(param)}
    return {"error": {**shown, "type": kind, "code": code}}


def _sendable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def classify(error: CloverError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an engine's error."""
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        return 400, error_body(str(error), "invalid_request_error", error.param, code)
    if isinstance(error, QueueFullError):
        return 429, error_body(str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, (EngineClosedError, NodeDiedError)):
        return 503, error_body(str(error), "service_unavailable", code="engine_closed")
    return 500, error_body(str(error), "server_error")


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(CloverError, _on_clover_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


def own_path(scope: Scope) -> str:
    """The path that was asked for, without the prefix of a proxy in front."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, error.status, _headers(error.status))


async def _on_clover_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CloverError)
    status, body = classify(error)
    if status >= 500:
        log.error("%s: %s", request.url.path, error)
    return JSONResponse(body, status, _headers(status))


def _headers(status: int) -> dict[str, str] | None:
    if status == 401:
        return {"WWW-Authenticate": "Bearer"}
    return {"Retry-After": RETRY_AFTER} if status in (429, 503) else None


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first thing wrong with a body, named by its path (``messages.0.content``)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if not _is_json(request.headers.get("content-type", "")):
        message = "the body must be JSON: send it with the header Content-Type: application/json"
        return JSONResponse(error_body(message, "invalid_request_error"), 415)
    if first["type"] == "json_invalid":
        message = f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}"
        return JSONResponse(error_body(message, "invalid_request_error"), 400)
    param = _param(first["loc"])
    if first["type"] == "extra_forbidden":
        message = f"unknown parameter: {param}"
    else:
        # A value that fits none of several types has an error for each of them.
        same = [one["msg"] for one in error.errors() if _param(one["loc"]) == param]
        wrong = " or ".join(dict.fromkeys(msg.removeprefix("Value error, ") for msg in same))
        message = f"{param or 'body'}: {wrong}"
    return JSONResponse(error_body(message, "invalid_request_error", param), 400)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind.startswith("application/") and kind.endswith(("/json", "+json"))


def _param(loc: Sequence[int | str]) -> str | None:
    """``messages.0.content`` from where pydantic says it was, less the names of union members."""
    parts = [part for part in loc[1:] if part != "str" and "[" not in str(part)]
    return ".".join(str(part) for part in parts) or None


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    path = own_path(request.scope)
    message, code = f"{request.method} {path}: {error.detail}", None
    if error.status_code == 404 and path in WITHOUT_PREFIX:
        message += f"; it is at /v1{path}: give clients the address with /v1"
    for prefix, what in UNSERVED.items():
        if error.status_code == 404 and (path == prefix or path.startswith(f"{prefix}/")):
            message, code = f"{path}: this server does not serve {what}", "unsupported_endpoint"
    body = error_body(message, "invalid_request_error", code=code)
    return JSONResponse(body, error.status_code, error.headers)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again after this answer, so that the server logs the traceback.
    record = request.scope.get("state", {}).get("record")
    headers = {"X-Request-Id": record.id} if record is not None else None
    body = error_body("internal error; see the server's log", "server_error")
    return JSONResponse(body, 500, headers)
