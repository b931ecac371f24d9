"""Errors in OpenAI's form: which exception is which status, and what the body says."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ..core.errors import CloverError, EngineClosedError, QueueFullError, RequestError

log = logging.getLogger(__name__)
RETRY_AFTER = "1"
"""Seconds that a client should wait when the queue is full."""


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


def error_body(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def classify(error: CloverError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an engine's error."""
    if isinstance(error, RequestError):
        return 400, error_body(str(error), "invalid_request_error", error.param)
    if isinstance(error, QueueFullError):
        return 429, error_body(str(error), "rate_limit_error", code="queue_full")
    if isinstance(error, EngineClosedError):
        return 503, error_body(str(error), "service_unavailable", code="engine_closed")
    return 500, error_body(str(error), "server_error")


def install_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(CloverError, _on_clover_error)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_unexpected)


async def _on_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
    return JSONResponse(error.body, error.status, headers)


async def _on_clover_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, CloverError)
    status, body = classify(error)
    if status >= 500:
        log.error("%s: %s", request.url.path, error)
    headers = {"Retry-After": RETRY_AFTER} if status == 429 else None
    return JSONResponse(body, status, headers)


async def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    """The first thing wrong with a body, named by its path (``messages.0.content``)."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
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


def _param(loc: Sequence[int | str]) -> str | None:
    """``messages.0.content`` from where pydantic says it was, less the names of union members."""
    parts = [part for part in loc[1:] if part != "str" and "[" not in str(part)]
    return ".".join(str(part) for part in parts) or None


async def _on_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    body = error_body(message, "invalid_request_error")
    return JSONResponse(body, error.status_code, error.headers)


async def _on_unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again after this answer, so that the server logs the traceback.
    return JSONResponse(error_body("internal error; see the server's log", "server_error"), 500)
