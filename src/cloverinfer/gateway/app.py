"""The orchestrator's application: routes, what stands in front of them, and its background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
from fastapi import APIRouter, FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from .. import __version__
from ..config import OrchestratorConfig, ServerConfig
from ..core.clock import Clock, monotonic
from ..core.errors import CloverError
from ..server.door import Door, FrontDoor, cors_options
from ..server.errors import install_handlers
from .announcements import Announcements
from .asked import CHAT, COMPLETIONS
from .dispatch import Dispatcher
from .entry import Entry
from .instances import Announcement, Registry, check_url
from .metrics import OrchestratorMetrics
from .node import watch
from .probe import Probe
from .prompts import load_encode
from .router import Router
from .status import Status
from .upstream import Upstream

log = logging.getLogger("cloverinfer.instances")


def build_gateway(
    settings: OrchestratorConfig, server: ServerConfig, clock: Clock = monotonic
) -> FastAPI:
    """The application; ``app.state`` has its ``door`` and its ``registry``."""
    door = Door(server.shutdown_timeout)
    registry = Registry(clock, settings)
    router = Router(registry, settings.policy)
    metrics = OrchestratorMetrics(registry)
    probes = [_probe(one, settings.instance_api_key) for one in settings.instances]
    encode = load_encode(settings.tokenizer) if settings.tokenizer else None

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        upstream = Upstream(settings, metrics.attempt)
        key = settings.instance_api_key
        dispatcher = Dispatcher(router, upstream, settings.attempts, key, settings.usage_stages)
        passes_key = not server.api_key
        entry = Entry(dispatcher, router, door, metrics, encode, passes_key, clock)
        for path in (COMPLETIONS, CHAT):
            app.router.routes.append(Route(path, entry, methods=["POST"]))
        watching = asyncio.ensure_future(_watch_all(probes, settings, registry))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await dispatcher.close()
            await upstream.close()

    app = FastAPI(
        title="CloverInfer orchestrator", version=__version__, lifespan=lifespan, openapi_url=None
    )
    app.state.door, app.state.registry = door, registry
    install_handlers(app)
    app.include_router(_routes(Status(registry, router, door, settings.policy), metrics))
    app.add_middleware(FrontDoor, settings=server, door=door)
    if server.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_options(server))  # it answers preflights
    app.add_middleware(Announcements, registry=registry, settings=settings)
    return app


def _routes(status: Status, metrics: OrchestratorMetrics) -> APIRouter:
    router = APIRouter()
    get = ["GET"]
    router.add_api_route("/v1/models", status.models, methods=get)
    router.add_api_route("/v1/models/{name:path}", status.model, methods=get)
    router.add_api_route("/v1/cluster", status.cluster, methods=get)
    router.add_api_route("/version", status.version, methods=get)
    probes = ["GET", "HEAD"]  # load balancers ask by HEAD
    router.add_api_route("/health", status.health, methods=probes)
    router.add_api_route("/ready", status.ready, methods=probes)
    router.add_api_route("/metrics", metrics.page, methods=probes, response_class=Response)
    return router


async def _watch_all(
    probes: Sequence[Probe], settings: OrchestratorConfig, registry: Registry
) -> None:
    """Keeps the instances that the settings name announced, as their own nodes would."""

    async def deliver(told: Announcement) -> None:
        try:
            registry.announce(told)
        except CloverError as error:
            log.warning("%s: %s", told.url, error)

    if not probes:
        return
    async with aiohttp.ClientSession() as http:
        interval = settings.heartbeat_timeout / 5
        await asyncio.gather(*(watch(http, probe, deliver, interval) for probe in probes))


def _probe(named: str, key: str | None) -> Probe:
    role, _, rest = named.partition("=")
    url, _, place = rest.partition("#")
    return Probe(check_url(url), role, place or None, api_key=key)
