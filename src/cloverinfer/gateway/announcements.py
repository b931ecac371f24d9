"""``/v1/instances``: where instances announce themselves, beat and withdraw.

It stands beside the front door, not behind it: instances show a secret of their own, and must be
heard while clients are sent away.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging

import msgspec
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from ..config import OrchestratorConfig
from ..core.errors import ConfigError
from ..server.errors import error_body, own_path
from .instances import Announcement, Registry, StaleError, Withdrawal

log = logging.getLogger("cloverinfer.instances")
PATH = "/v1/instances"
MOST_BYTES = 1 << 20
SECONDS = 10.0
"""That an announcement may take to arrive."""
_announcement = msgspec.json.Decoder(Announcement)
_withdrawal = msgspec.json.Decoder(Withdrawal)


class Announcements:
    """ASGI middleware: takes its own path, and passes the others on."""

    def __init__(self, app: ASGIApp, registry: Registry, settings: OrchestratorConfig) -> None:
        self._app = app
        self._registry = registry
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or own_path(scope) != PATH:
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is None:
            try:
                body = await asyncio.wait_for(_body(receive), SECONDS)
            except asyncio.TimeoutError:
                refusal = _error(408, f"the announcement did not arrive within {SECONDS:g} s")
            else:
                refusal = self._take(scope["method"], body)
        await refusal(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        if scope["method"] not in ("POST", "DELETE"):
            return _error(405, "announce by POST, withdraw by DELETE")
        secret = self._settings.secret
        if secret is None:
            if _is_local(scope.get("client")):
                return None
            return _error(403, "instances of other hosts need a secret: set orchestrator.secret")
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, f"Bearer {secret}".encode()):
            return None
        return _error(401, "missing or wrong secret (orchestrator.secret)")

    def _take(self, method: str, body: bytes | None) -> JSONResponse:
        if body is None:
            return _error(413, f"an announcement has at most {MOST_BYTES} bytes")
        try:
            if method == "POST":
                self._registry.announce(_announcement.decode(body))
            else:
                told = _withdrawal.decode(body)
                self._registry.withdraw(told)
                log.info("%s withdrew", told.url)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            return _error(400, f"no announcement: {error}")
        except ConfigError as error:
            return _error(400, str(error))
        except StaleError as error:
            return _error(409, str(error))
        return JSONResponse({"heartbeat_timeout": self._settings.heartbeat_timeout})


def _error(status: int, message: str) -> JSONResponse:
    kind = "authentication_error" if status in (401, 403) else "invalid_request_error"
    return JSONResponse(error_body(message, kind), status, {"Connection": "close"})


def _is_local(client: tuple[str, int] | None) -> bool:
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None where it is too long. One that is cut short is no announcement."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)
