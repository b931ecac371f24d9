"""``cloverinfer deploy``: installs, runs and stops a cluster on hosts that are reached over ssh."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

INVENTORY = "deploy/cluster.yaml"
ENV_FILE = ".env"
WORK = "build/deploy"


def add(commands: Any) -> None:
    deploy = commands.add_parser(
        "deploy",
        help="install, run and stop a cluster on hosts over ssh",
        description="Installs, runs and stops a cluster on the hosts of an inventory, over ssh.",
    )
    deploy.set_defaults(parser=deploy)
    verbs = deploy.add_subparsers(metavar=" | ".join(_VERBS), required=True)
    for name, (text, verb) in _VERBS.items():
        parser = verbs.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        parser.set_defaults(command=run, parser=parser, verb=verb)
        _add_common(parser)
        if name == "run":
            text = "prefill nodes, in mode vllm instances"
            parser.add_argument("prefill", type=int, metavar="P", help=text)
            text = "dense nodes; without A: decode nodes, which hold attention too, in mode vllm "
            text += "decode instances"
            parser.add_argument("dense", type=int, metavar="D", help=text)
            text = "attention nodes; not in mode vllm"
            parser.add_argument("attention", type=int, metavar="A", nargs="?", help=text)
        elif name == "logs":
            text = "lines of each log (default: 20)"
            parser.add_argument("-n", "--lines", type=int, default=20, metavar="N", help=text)
        elif name == "verify":
            text = "check this transport; repeatable (default: all that the host has)"
            parser.add_argument(
                "--transport", action="append", default=[], metavar="NAME", help=text
            )


def _add_common(parser: argparse.ArgumentParser) -> None:
    text = f"hosts, roles and settings (default: {INVENTORY})"
    parser.add_argument("--inventory", metavar="FILE", default=INVENTORY, help=text)
    text = f"MODEL_NAME, MAX_MODEL_LEN and others; none: {ENV_FILE} where it exists"
    parser.add_argument("--env", metavar="FILE", help=text)
    text = "only these hosts (default: all)"
    parser.add_argument("--hosts", metavar="NAME,NAME", help=text)
    text = "print every command, touch nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = f"folder of the per-host logs (default: {WORK}/logs/TIME)"
    parser.add_argument("--logs", metavar="DIR", help=text)


def run(args: argparse.Namespace) -> int:
    args.verb(_fleet(args), args)
    return 0


def _fleet(args: argparse.Namespace) -> Any:
    import msgspec

    from ..deploy.fleet import Fleet
    from ..deploy.inventory import load_inventory

    env = Path(args.env) if args.env else Path(ENV_FILE) if Path(ENV_FILE).exists() else None
    inventory = load_inventory(Path(args.inventory), env)
    if args.hosts is not None:
        names = args.hosts.split(",")
        unknown = set(names) - {host.name for host in inventory.hosts}
        if unknown:
            known = ", ".join(host.name for host in inventory.hosts)
            raise ConfigError(f"--hosts {', '.join(unknown)}: the inventory has {known}")
        hosts = [host for host in inventory.hosts if host.name in names]
        inventory = msgspec.structs.replace(inventory, hosts=hosts)
    logs = Path(args.logs or f"{WORK}/logs/{time.strftime('%Y%m%d-%H%M%S')}")
    if not args.dry_run:
        try:
            logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--logs: cannot make {logs}: {error.strerror}") from error
    return Fleet(inventory, logs, args.dry_run)


def _install(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy.setup import install

    install(fleet)


def _push(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy.setup import push

    push(fleet, Path(WORK))


def _run(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy import native, vllm

    if args.hosts is not None:
        raise ConfigError("deploy run needs all hosts of the inventory: leave --hosts out")
    counts = {"prefill": args.prefill, "decode": args.dense}
    if fleet.inventory.mode == "vllm":
        if args.attention is not None:
            raise ConfigError("in mode vllm there are no attention nodes: give P and D alone")
        vllm.run(fleet, counts)
        return
    if args.attention is not None:
        counts = {"prefill": args.prefill, "dense": args.dense, "attention": args.attention}
    native.run(fleet, counts)


def _stop(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy import lifecycle

    lifecycle.stop(fleet)


def _status(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy import lifecycle

    lifecycle.status(fleet)


def _logs(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy.watch import logs

    logs(fleet, args.lines)


def _verify(fleet: Any, args: argparse.Namespace) -> None:
    from ..deploy.watch import verify

    verify(fleet, args.transport)


_VERBS: dict[str, tuple[str, Callable[[Any, argparse.Namespace], None]]] = {
    "install": ("make an environment with all that the package needs on every host", _install),
    "push": ("put this version of the package on every host", _push),
    "run": (
        "start P prefill, D dense and A attention nodes (mode vllm: P prefill and D decode "
        "instances), and prove that they work",
        _run,
    ),
    "stop": ("end all that runs on the hosts", _stop),
    "status": ("show versions and what runs on every host", _status),
    "logs": ("show the ends of the services' logs of every host", _logs),
    "verify": ("run cloverinfer verify on every host", _verify),
}
