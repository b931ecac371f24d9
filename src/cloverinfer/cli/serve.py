"""``cloverinfer serve``: an OpenAI-compatible server, until Ctrl-C or SIGTERM.

Flags have the names that ``vllm serve`` gives them wherever they mean the same.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import Any

from ..config import Config, ServerConfig
from ..config.server import LOG_LEVELS, TOOL_CALL_PARSERS
from ..core.errors import CloverError, ConfigError
from .engines import running
from .flags import add_common, config_of, option, option_list, switch

DEFAULTS = ServerConfig()


def add(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve an OpenAI-compatible API",
        description="Serves an OpenAI-compatible API until Ctrl-C or SIGTERM.",
    )
    serve.set_defaults(command=run, parser=serve)
    serve.add_argument("positional_model", metavar="MODEL", nargs="?", help="as --model")
    _add_listening(serve)
    _add_front_door(serve)
    _add_chat(serve)
    _add_logs(serve)
    add_common(serve)
    _add_for_others(serve)


def _add_listening(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    option(group, "--host", "server.host", f"address to listen on (default: {DEFAULTS.host})")
    option(
        group,
        "--port",
        "server.port",
        f"TCP port; 0 takes a free one (default: {DEFAULTS.port})",
        int,
    )
    text = "of the seeds drawn for requests that bring none, and of dummy weights (default: 0)"
    option(group, "--seed", "model.seed", text, int)
    text = "names that clients ask for (default: the model's own)"
    option_list(group, "--served-model-name", "server.served_model_name", text)
    text = "prefix that a proxy in front strips from paths (default: none)"
    option(group, "--root-path", "server.root_path", text)
    text = "PEM file of the key; with --ssl-certfile: HTTPS (default: none)"
    option(group, "--ssl-keyfile", "server.ssl_keyfile", text)
    option(group, "--ssl-certfile", "server.ssl_certfile", "PEM file of the certificate")
    text = "seconds that requests may go on after SIGTERM or Ctrl-C "
    text += f"(default: {DEFAULTS.shutdown_timeout:g})"
    option(group, "--shutdown-timeout", "server.shutdown_timeout", text, float)


def _add_front_door(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("front door")
    text = "ask for one of these bearer tokens; better in CLOVER_SERVER_API_KEY, which the list of "
    text += "processes does not show (default: none)"
    option_list(group, "--api-key", "server.api_key", text)
    text = f"largest request body in MiB (default: {DEFAULTS.max_body_mib:g})"
    option(group, "--max-body-mib", "server.max_body_mib", text, float)
    text = f"seconds that a body may take to arrive (default: {DEFAULTS.body_timeout:g})"
    option(group, "--body-timeout", "server.body_timeout", text, float)
    text = "origins whose pages may call the server; * for all (default: none, CORS is off)"
    option_list(group, "--allowed-origins", "server.allowed_origins", text)
    text = "methods that such pages may use (default: *)"
    option_list(group, "--allowed-methods", "server.allowed_methods", text)
    text = "headers that such pages may send (default: *)"
    option_list(group, "--allowed-headers", "server.allowed_headers", text)
    text = "such pages may send cookies and keys"
    switch(group, "--allow-credentials", "server.allow_credentials", text, "off")


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat and tools")
    text = "a Jinja template, or a file with one (default: the model's own)"
    option(group, "--chat-template", "chat.chat_template", text)
    text = "the model may call tools of its own accord; needs --tool-call-parser"
    switch(group, "--enable-auto-tool-choice", "chat.enable_auto_tool_choice", text, "off")
    text = "how the model writes its calls (default: none)"
    parsers = TOOL_CALL_PARSERS
    option(group, "--tool-call-parser", "chat.tool_call_parser", text, choices=parsers)


def _add_logs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("logs, on stderr")
    log = group.add_argument
    text = "no line for each request that has ended (default: one)"
    key = "server.log_requests"
    log("--disable-log-requests", dest=key, action="store_const", const=False, help=text)
    text = f"what the HTTP library logs (default: {DEFAULTS.uvicorn_log_level})"
    option(group, "--uvicorn-log-level", "server.uvicorn_log_level", text, choices=LOG_LEVELS)
    log("--quiet", action="store_true", help="no progress and no line for each request")


def _add_for_others(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("taken for the sake of scripts for other servers")
    text = "share of a GPU's memory, 0 to 1; changes nothing where nodes run on CPUs, whose KV "
    text += "pools --memory-gib sizes (default: none)"
    group.add_argument("--gpu-memory-utilization", type=float, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    config = _settings(args)
    if not args.quiet and config.server.log_requests:
        _log_requests()
    from ..server import run as listening

    server = config.server
    # Bound first: a port that is taken is told before the model is loaded.
    with contextlib.closing(listening.bind(server.host, server.port)) as sock:
        with contextlib.ExitStack() as stack:
            from ..server.app import build_app
            from ..server.catalog import Catalog, load_chat

            chats = [load_chat(one.chat) for one in config.models]  # before what takes long
            engines = [stack.enter_context(running(one, args.quiet)) for one in config.models]
            names = [one.names for one in config.models]
            catalog = Catalog.of(engines, names, chats)
            app = build_app(catalog, server)
            listening.serve(app, sock, server, lambda line: print(line, flush=True))
            failures = [engine.failure for engine in engines if engine.failure is not None]
            if failures:
                raise CloverError("; ".join(failures))
    return 0


def _settings(args: argparse.Namespace) -> Config:
    given = vars(args)
    if args.positional_model is not None:
        if given["model.model_path"] is not None:
            raise ConfigError("give the model once: as the first argument, or by --model")
        given["model.model_path"] = args.positional_model
    share = args.gpu_memory_utilization
    if share is not None:
        if not 0 < share <= 1:
            raise ConfigError(f"--gpu-memory-utilization must be above 0, at most 1, not {share}")
        print("note: --gpu-memory-utilization changes nothing on CPUs", file=sys.stderr)
    return config_of(args)


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log = logging.getLogger("cloverinfer.requests")
    log.handlers = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False
