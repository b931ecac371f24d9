"""``cloverinfer orchestrate``: one OpenAI-compatible entry in front of instances, until Ctrl-C or
SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from typing import Any

from ..config import OrchestratorConfig, ServerConfig
from ..config.orchestrator import POLICIES
from .flags import config_of, option, switch
from .listening import add_front_door, add_listening, add_logs, log_requests

DEFAULTS = OrchestratorConfig()


def add(commands: Any) -> None:
    orchestrate = commands.add_parser(
        "orchestrate",
        help="one entry in front of several servers",
        description="Serves an OpenAI-compatible API by instances behind it, servers of their own, "
        "which announce themselves by `cloverinfer node` or are named here.",
    )
    orchestrate.set_defaults(command=run, parser=orchestrate)
    add = orchestrate.add_argument
    add("--config", metavar="FILE", help="YAML settings; flags win over them")
    add_listening(orchestrate)
    add_front_door(orchestrate)
    _add_instances(orchestrate)
    _add_faults(orchestrate)
    add_logs(orchestrate)


def _add_instances(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "instances",
        "The secret that they announce themselves with (CLOVER_ORCHESTRATOR_SECRET) and their API "
        "key (CLOVER_ORCHESTRATOR_INSTANCE_API_KEY) are variables or stand in the file: no flags.",
    )
    text = "both=URL, prefill=URL or decode=URL#HOST:PORT (of its connector): one that does not "
    text += "announce itself; repeatable (default: none)"
    group.add_argument(
        "--instance", dest="orchestrator.instances", action="append", metavar="TEXT", help=text
    )
    text = f"which instance takes a request (default: {DEFAULTS.policy})"
    option(group, "--policy", "orchestrator.policy", text, choices=POLICIES)
    text = "tokenizer.json, or a folder with one, by which prefix_aware reads prompts as tokens "
    text += "(default: none, prompts are read as text)"
    option(group, "--tokenizer", "orchestrator.tokenizer", text)
    text = "seconds without a heartbeat until an instance gets no more requests "
    text += f"(default: {DEFAULTS.heartbeat_timeout:g})"
    option(group, "--heartbeat-timeout", "orchestrator.heartbeat_timeout", text, float)
    text = "the usage of answers tells the seconds of their stages"
    switch(group, "--usage-stages", "orchestrator.usage_stages", text)


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults of instances")
    text = f"instances that a request may be tried on (default: {DEFAULTS.attempts})"
    option(group, "--attempts", "orchestrator.attempts", text, int)
    text = (
        f"faults in a row that make an instance be left alone (default: {DEFAULTS.breaker_faults})"
    )
    option(group, "--breaker-faults", "orchestrator.breaker_faults", text, int)
    text = "seconds for which it is, until one request tries it again "
    text += f"(default: {DEFAULTS.breaker_seconds:g})"
    option(group, "--breaker-seconds", "orchestrator.breaker_seconds", text, float)
    text = "seconds that a connection to an instance may take "
    text += f"(default: {DEFAULTS.connect_timeout:g})"
    option(group, "--connect-timeout", "orchestrator.connect_timeout", text, float)
    text = "seconds that an instance may be silent while it answers "
    text += f"(default: {DEFAULTS.answer_timeout:g})"
    option(group, "--answer-timeout", "orchestrator.answer_timeout", text, float)
    text = "seconds that an instance with requests may leave /health unanswered until they are "
    text += f"given up (default: {DEFAULTS.hang_timeout:g})"
    option(group, "--hang-timeout", "orchestrator.hang_timeout", text, float)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    server = config.server
    _say_what_is_ignored(server)
    logging.basicConfig(format="%(asctime)s %(message)s")
    if not args.quiet:
        logging.getLogger("cloverinfer.instances").setLevel(logging.INFO)
        if server.log_requests:
            log_requests()
    from ..gateway.app import build_gateway
    from ..server import run as listening

    with contextlib.closing(listening.bind(server.host, server.port)) as sock:
        app = build_gateway(config.orchestrator, server)
        listening.serve(app, sock, server, lambda line: print(line, flush=True), lifespan="on")
    return 0


def _say_what_is_ignored(server: ServerConfig) -> None:
    if server.served_model_name:
        text = "note: server.served_model_name changes nothing here: instances name their models"
        print(text, file=sys.stderr)
