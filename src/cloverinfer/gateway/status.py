"""What is not generation: models, health, readiness, the instances."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from .. import __version__
from ..server.door import Door
from ..server.errors import RETRY_AFTER, ApiError, error_body
from .instances import Instance, Registry
from .router import Router


class Status:
    """The handlers."""

    def __init__(self, registry: Registry, router: Router, door: Door, policy: str) -> None:
        self._registry = registry
        self._router = router
        self._door = door
        self._policy = policy

    async def health(self) -> dict[str, str]:
        """The orchestrator lives, whatever becomes of instances."""
        return {"status": "ok"}

    async def ready(self) -> JSONResponse:
        """Whether requests for any model can be served."""
        problem = None
        if self._door.draining:
            problem = "the orchestrator is shutting down"
        elif not self._router.cards():
            problem = "no instances that could serve a request are heard of"
        if problem is None:
            return JSONResponse({"status": "ready"})
        body = error_body(problem, "service_unavailable", code="not_ready")
        return JSONResponse(body, 503, {"Retry-After": RETRY_AFTER})

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": self._router.cards()}

    async def model(self, name: str) -> dict[str, Any]:
        for card in self._router.cards():
            if card["id"] == name:
                return card
        text = f"the model {name!r} does not exist"
        raise ApiError(404, text, "invalid_request_error", "model", "model_not_found")

    async def cluster(self) -> dict[str, Any]:
        """Every instance: what it told, and what is known of it here."""
        rows = [self._row(one) for one in self._registry.all()]
        return {"object": "cluster", "policy": self._policy, "instances": rows}

    def _row(self, one: Instance) -> dict[str, Any]:
        told = one.told
        return {
            "url": told.url,
            "role": told.role,
            "engine": told.engine,
            "incarnation": told.incarnation,
            "models": list(told.names),
            "kv_address": told.kv_address,
            "problem": told.problem,
            "running": told.load.running,
            "waiting": told.load.waiting,
            "kv_usage": told.load.kv_usage,
            "in_flight": one.in_flight,
            "breaker": one.breaker.state,
            "heard_seconds_ago": round(self._registry.age(one), 3),
        }
