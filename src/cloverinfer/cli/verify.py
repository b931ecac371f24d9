"""``cloverinfer verify``: checks this host's transports, or a pair of hosts.

The exit status is the verdict: 0 where all that was asked for works, 1 where something fails. What
is optional and absent is a note, unless ``--transport`` names it.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import msgspec

from ..config.cluster import TRANSPORTS
from ..config.network import NetworkConfig
from .flags import config_of, option

LISTEN_HERE = ""
"""What ``--listen`` alone stands for: where the settings say."""


def add(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help="check the transports of this host, or of two",
        description="Checks what each transport needs, then moves patterns between two processes, "
        "or two hosts, and measures.",
    )
    verify.set_defaults(command=run, parser=verify)
    add = verify.add_argument
    names = [name for name in TRANSPORTS if name != "auto"]
    text = "check this one; repeatable (default: all that this host has)"
    add("--transport", action="append", default=[], choices=names, dest="names", help=text)
    side = verify.add_mutually_exclusive_group()
    text = "check this host and the one that listens there"
    side.add_argument("--peer", metavar="HOST:PORT", help=text)
    text = "be the other side of a check (default: network.bind_host and network.port)"
    side.add_argument("--listen", metavar="HOST:PORT", nargs="?", const=LISTEN_HERE, help=text)
    add("--wait", type=float, default=600.0, metavar="X",
        help="seconds that --listen waits for the other side (default: 600)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object instead of lines")
    add("--quiet", action="store_true", help="no progress")
    add("--config", metavar="FILE", help="YAML settings; flags win over them")
    _add_network(verify)


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = NetworkConfig()
    group = parser.add_argument_group(
        "network", "The secret comes from CLOVER_NETWORK_SECRET or the file, never from a flag."
    )
    text = f"address that wires between hosts listen at (default: {network.bind_host})"
    option(group, "--bind-host", "network.bind_host", text)
    text = "host name or address that peers are told (default: --bind-host)"
    option(group, "--advertise-host", "network.advertise_host", text)
    text = f"connections per peer over tcp (default: {network.tcp_streams})"
    option(group, "--tcp-streams", "network.tcp_streams", text, int)


def run(args: argparse.Namespace) -> int:
    from ..verify import run as checks
    from ..verify.report import Finding, good

    network = config_of(args).cluster.network
    found: list[Finding] = []

    def emit(finding: Finding) -> None:
        found.append(finding)
        if not args.json:
            print(finding.line(), flush=True)

    def progress(line: str) -> None:
        if not args.quiet:
            print(line, file=sys.stderr, flush=True)

    def ready(place: str) -> None:
        print(f"listening at {place}", file=sys.stderr if args.json else sys.stdout, flush=True)

    if args.peer is not None:
        checks.check_pair(args.names, network, args.peer, emit, progress)
    elif args.listen is not None:
        if args.listen != LISTEN_HERE:
            host, port = checks.split(args.listen)
            network = msgspec.structs.replace(network, bind_host=host, port=port)
        checks.listen(network, args.wait, emit, ready)
    else:
        checks.check_host(args.names, network, emit, progress)
    verdict = "ok" if good(found) else "fail"
    if args.json:
        print(json.dumps({"verdict": verdict, "findings": msgspec.to_builtins(found)}), flush=True)
    else:
        print(f"verdict: {verdict}", flush=True)
    return 0 if verdict == "ok" else 1
