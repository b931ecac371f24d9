"""The application: routes, and what stands in front of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI, Response
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import Lifespan

from .. import __version__
from ..config import ServerConfig
from .catalog import Catalog
from .door import Door, FrontDoor, cors_options
from .errors import install_handlers
from .generation import Generation
from .metrics import CountRequests, ServerMetrics
from .utilities import Utilities


def build_app(
    catalog: Catalog,
    settings: ServerConfig | None = None,
    lifespan: Lifespan[FastAPI] | None = None,
) -> FastAPI:
    """The application over running engines, which it neither starts nor closes.

    ``app.state.door`` is its ``Door``, by which it is drained.
    """
    settings = settings or ServerConfig()
    app = FastAPI(title="CloverInfer", version=__version__, lifespan=lifespan)
    door = app.state.door = Door(settings.shutdown_timeout)
    install_handlers(app)
    router = _routes(Generation(catalog, door), Utilities(catalog, door))
    app.include_router(router)
    metrics = ServerMetrics(catalog)
    app.add_api_route("/metrics", metrics.page, methods=["GET"], response_class=Response)
    app.add_api_route("/metrics", metrics.page, methods=["HEAD"], include_in_schema=False)
    app.add_middleware(FrontDoor, settings=settings, door=door)
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, **cors_options(settings))  # it answers preflights
    routes = frozenset(one.path for one in router.routes if isinstance(one, Route))
    app.add_middleware(CountRequests, metrics=metrics, routes=routes)  # outermost: it sees all
    return app


def _routes(generation: Generation, utilities: Utilities) -> APIRouter:
    router = APIRouter()
    get = ["GET"]
    post: dict[str, Any] = {"methods": ["POST"], "response_model": None}
    router.add_api_route("/v1/models", utilities.models, methods=get)
    router.add_api_route("/v1/models/{name:path}", utilities.model, methods=get)
    router.add_api_route("/v1/completions", generation.completions, **post)
    router.add_api_route("/v1/chat/completions", generation.chat, **post)
    router.add_api_route("/v1/cluster", utilities.cluster, methods=get)
    router.add_api_route("/v1/load_lora_adapter", utilities.no_adapters, **post)
    router.add_api_route("/v1/unload_lora_adapter", utilities.no_adapters, **post)
    router.add_api_route("/tokenize", utilities.tokenize, **post)
    router.add_api_route("/detokenize", utilities.detokenize, **post)
    router.add_api_route("/health", utilities.health, methods=get)
    router.add_api_route("/ping", utilities.health, methods=get)
    router.add_api_route("/ready", utilities.ready, methods=get)
    router.add_api_route("/version", utilities.version, methods=get)
    probed = {"/health": utilities.health, "/ping": utilities.health, "/ready": utilities.ready}
    for path, answer in probed.items():  # load balancers ask by HEAD
        router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    return router
