"""``cloverinfer serve``: an OpenAI-compatible server, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from ..config import ServerConfig
from ..core.errors import CloverError
from .engines import running
from .flags import add_common, config_of, option


def add(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve an OpenAI-compatible API",
        description="Serves an OpenAI-compatible API until Ctrl-C or SIGTERM.",
    )
    serve.set_defaults(command=run, parser=serve)
    _add_server(serve)
    add_common(serve)


def _add_server(parser: argparse.ArgumentParser) -> None:
    server = ServerConfig()
    group = parser.add_argument_group("server")
    option(group, "--host", "server.host", f"address to listen on (default: {server.host})")
    option(group, "--port", "server.port", f"0 takes a free one (default: {server.port})", int)
    option(group, "--served-model-name", "server.served_model_name", "default: the model's own")
    option(group, "--api-key", "server.api_key", "ask for this bearer token (default: none)")
    group.add_argument("--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    from ..server import run as listening

    # Bound first: a port that is taken is told before the model is loaded.
    with contextlib.closing(listening.bind(config.server.host, config.server.port)) as sock:
        with running(config, args.quiet) as engine:
            from ..server.app import build_app

            app = build_app(engine, config.server.served_model_name, config.server.api_key)
            listening.serve(app, sock, lambda line: print(line, flush=True))
            if engine.failure is not None:
                raise CloverError(engine.failure)
    return 0
