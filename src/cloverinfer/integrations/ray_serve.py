"""The server as an application of Ray Serve, as a RayService of KubeRay runs one.

One replica holds the engine; its nodes are Ray actors where the cluster offers room for them. Ray
Serve listens, routes, probes and drains; this module knows nothing of that but what it is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from ray import serve

from ..config import Config, ServerConfig, load_config
from ..core.errors import CloverError, ConfigError
from ..orchestrator.llm import AsyncLLM
from ..server.app import build_app
from ..server.catalog import Catalog, load_chat

log = logging.getLogger("ray.serve")
"""Whose lines Ray Serve keeps with the replica's own."""
NAME = "CloverInfer"
"""Of the deployment, by which a Serve configuration sets its options."""
MOST_REQUESTS = 10_000
"""That Ray Serve hands to the replica at a time; the engine's scheduler queues them."""
CLOSING = 30.0
"""Seconds that the engine may take to close once its requests are over."""
_LISTENING = (
    "host",
    "port",
    "root_path",
    "log_requests",
    "uvicorn_log_level",
    "ssl_keyfile",
    "ssl_certfile",
)


class Replica:
    """A running engine and the HTTP application over it."""

    def __init__(self, config: Config) -> None:
        """Blocks until all nodes are ready; raises a ``CloverError`` that says why they are not."""
        served, self._server = config.models[0], config.server
        chat = load_chat(served.chat)  # before what takes long
        self._engine = AsyncLLM(served.model, served.cluster, log.info)
        self._catalog = Catalog.of([self._engine], [served.names], [chat])

    def __serve_build_asgi_app__(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(app: FastAPI) -> AsyncIterator[None]:
            try:
                yield
            finally:
                await asyncio.to_thread(self._engine.close)

        return build_app(self._catalog, self._server, lifespan)

    def check_health(self) -> None:
        """Raises why the engine can serve no more: Ray Serve then starts another replica."""
        if self._engine.failure is not None:
            raise CloverError(self._engine.failure)


def build(args: dict[str, Any]) -> serve.Application:
    """The application; ``args`` are the sections of a configuration file, which win over variables.

    ``ConfigError`` for what a server of one model cannot be set to, or what Ray Serve is told
    elsewhere.
    """
    config = load_config(overrides=args)
    for name in _LISTENING:
        if getattr(config.server, name) != getattr(ServerConfig(), name):
            raise ConfigError(
                f"server.{name} has no effect here, as Ray Serve listens: leave it out, and set "
                "http_options, route_prefix or logging_config of the Serve configuration"
            )
    deployment = serve.deployment(
        name=NAME,
        num_replicas=1,
        max_ongoing_requests=MOST_REQUESTS,
        graceful_shutdown_timeout_s=config.server.shutdown_timeout + CLOSING,
    )
    return deployment(serve.ingress()(Replica)).bind(config)
