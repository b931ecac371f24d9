"""``cloverinfer node``: announces an instance to orchestrators for as long as it runs beside it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
from typing import Any

from ..config.orchestrator import ROLES, is_place
from ..core.errors import ConfigError
from .flags import config_of

INTERVAL = 1.0
"""Seconds between two heartbeats, unless told otherwise."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


def add(commands: Any) -> None:
    node = commands.add_parser(
        "node",
        help="announce a server to an orchestrator",
        description="Announces a server to orchestrators, tells them of its health and load, and "
        "withdraws it at SIGTERM or Ctrl-C. It does not start or stop the server.",
    )
    node.set_defaults(command=run, parser=node)
    add = node.add_argument
    add("--config", metavar="FILE", help="YAML settings")
    add("--url", required=True, metavar="URL", help="the server, as this command reaches it")
    text = "both: answers whole requests; prefill, decode: vLLM with the connector"
    add("--role", required=True, choices=ROLES, help=text)
    text = "HOST:PORT where its connector meets prefill instances; with --role decode only"
    add("--kv-address", metavar="TEXT", help=text)
    text = "the server, as orchestrators reach it (default: as --url)"
    add("--advertise-url", metavar="URL", help=text)
    text = "whom to tell; repeatable (default: http://127.0.0.1:8000)"
    add("--orchestrator", action="append", metavar="URL", help=text)
    text = f"seconds between heartbeats (default: {INTERVAL:g})"
    add("--interval", type=float, default=INTERVAL, metavar="X", help=text)


def run(args: argparse.Namespace) -> int:
    settings = config_of(args).orchestrator
    if (args.role == "decode") != (args.kv_address is not None):
        raise ConfigError("--kv-address goes with --role decode, which needs it, and no other role")
    if args.kv_address is not None and not is_place(args.kv_address):
        raise ConfigError(f"--kv-address must be HOST:PORT, not {args.kv_address!r}")
    if not 0 < args.interval <= 3600:
        raise ConfigError(f"--interval must be above 0, at most 3600, not {args.interval:g}")
    logging.basicConfig(format="%(asctime)s %(message)s")
    from ..gateway.instances import check_url
    from ..gateway.probe import Probe

    public = check_url(args.advertise_url or args.url)
    key = settings.instance_api_key
    probe = Probe(check_url(args.url), args.role, args.kv_address, public, key)
    urls = [check_url(url) for url in args.orchestrator or ["http://127.0.0.1:8000"]]
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        ended_by = asyncio.run(_run(probe, urls, settings.secret, args.interval))
    finally:
        for number, handler in before.items():  # which the loop does not give back
            signal.signal(number, handler)
    signal.raise_signal(ended_by)
    return 0


async def _run(probe: Any, urls: list[str], secret: str | None, interval: float) -> int:
    """The number of the signal that ended it."""
    from ..gateway.node import run_node

    stop, numbers = asyncio.Event(), []

    def end(number: int) -> None:
        numbers.append(number)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, end, number)
    await run_node(probe, urls, secret, interval, stop)
    return numbers[0]
