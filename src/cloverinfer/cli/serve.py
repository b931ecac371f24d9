"""``cloverinfer serve``: an OpenAI-compatible server, until Ctrl-C or SIGTERM.

Flags have the names that ``vllm serve`` gives them wherever they mean the same.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from ..config import Config
from ..config.server import TOOL_CALL_PARSERS
from ..core.errors import CloverError, ConfigError
from .engines import running
from .flags import add_common, config_of, option, option_list, switch
from .listening import add_front_door, add_listening, add_logs, log_requests


def add(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve an OpenAI-compatible API",
        description="Serves an OpenAI-compatible API until Ctrl-C or SIGTERM.",
    )
    serve.set_defaults(command=run, parser=serve)
    serve.add_argument("positional_model", metavar="MODEL", nargs="?", help="as --model")
    _add_listening(serve)
    add_front_door(serve)
    _add_chat(serve)
    add_logs(serve)
    add_common(serve)


def _add_listening(parser: argparse.ArgumentParser) -> None:
    group = add_listening(parser)
    text = "of the seeds drawn for requests that bring none, and of dummy weights (default: 0)"
    option(group, "--seed", "model.seed", text, int)
    text = "names that clients ask for (default: the model's own)"
    option_list(group, "--served-model-name", "server.served_model_name", text)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("chat and tools")
    text = "a Jinja template, or a file with one (default: the model's own)"
    option(group, "--chat-template", "chat.chat_template", text)
    text = "the model may call tools of its own accord; needs --tool-call-parser"
    switch(group, "--enable-auto-tool-choice", "chat.enable_auto_tool_choice", text, "off")
    text = "how the model writes its calls (default: none)"
    parsers = TOOL_CALL_PARSERS
    option(group, "--tool-call-parser", "chat.tool_call_parser", text, choices=parsers)


def run(args: argparse.Namespace) -> int:
    config = _settings(args)
    if not args.quiet and config.server.log_requests:
        log_requests()
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
    return config_of(args)
