"""The life of a cluster, whatever runs in it: begun and proven, looked at, stopped as a whole."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from .. import __version__
from ..config.load import Settings
from ..config.network import RDMA_DEVICES
from . import services
from .fleet import Fleet, FleetError
from .inventory import Inventory
from .remote import Remote
from .setup import PLAN, PYTHON, in_folder, skew

SERVER, ORCHESTRATOR, RAY = "server", "orchestrator", "ray"
ENTRIES = (SERVER, ORCHESTRATOR)
"""Services of the head that take requests: they end before the others."""
OTHERS = ("node-*", "vllm-*", RAY, "*")
"""Names of the other services, in the order in which they end."""
ON_HOST = f"{PYTHON} -m cloverinfer.deploy.on_host"
RAY_FOLDER = "run/ray-folder"
"""File with the name of Ray's folder of this run."""
_CONFIG = "run/config.yaml"
"""The entry's settings, where ``on_host`` looks for them too."""
_STOP_LIMIT = 2.0 * services.STOP_SECONDS * (len(ENTRIES) + len(OTHERS)) + 60.0
"""Seconds for services that each ignore TERM, and for the looks at what is left."""
Look = Callable[[Fleet, Remote], str]
"""What is done on one host; returns what to say of it."""


def begin(
    fleet: Fleet, plan: Mapping[str, Any], check: Look, start: Callable[[str], None], prove: Look
) -> None:
    """Starts all by ``start``, which is given the plan as text, and ends when ``prove`` has had its
    requests answered by all. What this started is stopped again where something fails."""
    text = json.dumps({**plan, "settings": _digest(fleet.inventory)})
    if _runs_already(fleet, text):
        fleet.on_head("prove", lambda remote: prove(fleet, remote))
    else:
        fleet.on_all("check", lambda remote: _make_ready(fleet, remote, check))
        try:
            start(text)
            fleet.on_head("prove", lambda remote: prove(fleet, remote))
        except (FleetError, KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM
            fleet.say("== what was started is stopped again")
            stop(fleet)
            raise
    if fleet.dry_run:
        fleet.say("# a dry run: these are the commands, nothing was started")
    else:
        fleet.say(f"ready: {entry_url(fleet.inventory)}")


def _digest(inventory: Inventory) -> str:
    """Tells settings apart without telling them."""
    fields = (inventory.settings, inventory.environment, inventory.vllm, inventory.port)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:8]


def _runs_already(fleet: Fleet, plan: str) -> bool:
    """``FleetError`` where something else runs."""
    script = f'echo "$(cat {PLAN} 2>/dev/null)"\n{services.running()}'
    plans: list[str] = []

    def look(remote: Remote) -> str:
        found, _, listing = remote.run(in_folder(fleet.inventory, script)).partition("\n")
        runs = services.names_of(listing)
        plans.extend([found] if set(ENTRIES) & set(runs) else [])
        return f"runs {' and '.join(runs) or 'nothing'}"

    fleet.on_head("look", look)
    if not plans:
        return False
    [found] = plans
    if found != plan:
        raise FleetError(f"{_what_else(found, plan)} runs already: run deploy stop first")
    return True


def _what_else(found: str, plan: str) -> str:
    if not found:
        return "the version before the last deploy push"
    counts = counts_of(found)
    return "the same with other settings" if counts == counts_of(plan) else counts


def counts_of(plan: str) -> str:
    """A plan for people."""
    fields = json.loads(plan)
    return ", ".join(f"{key} {fields[key]}" for key in fields if key != "settings")


def _make_ready(fleet: Fleet, remote: Remote, check: Look) -> str:
    """Ends what a run that was broken off left, then checks."""
    inventory = fleet.inventory
    left = services.names_of(remote.run(in_folder(inventory, services.running())))
    if left:
        remote.run(in_folder(inventory, _stop_script()), _STOP_LIMIT)
    return check(fleet, remote) + skew(remote)


def check_command(fleet: Fleet, remote: Remote, ports: list[int]) -> str:
    """The command line of a host's check: version, ports, GPUs, RDMA devices."""
    host = remote.host
    command = f"check {host.address} {__version__} --gpus {host.gpus}"
    command += "".join(f" --port {port}" for port in ports)
    return command + "".join(f" --nic {shlex.quote(nic)}" for nic in host.nics)


def configure(fleet: Fleet, variables: Mapping[str, str], settings: Settings, plan: str) -> None:
    """Gives every host the services' environment, on top of which are the inventory's variables,
    the entry's settings and the plan."""
    inventory = fleet.inventory
    hosts = ",".join([*(host.address for host in inventory.hosts), "127.0.0.1", "localhost"])
    proxies = {"no_proxy": hosts, "NO_PROXY": hosts, "no_grpc_proxy": hosts}
    found = proxies | dict(variables) | inventory.environment

    def one(remote: Remote) -> str:
        nics = {RDMA_DEVICES: ",".join(remote.host.nics)} if remote.host.nics else {}
        lines = (f"{name}={shlex.quote(value)}\n" for name, value in (nics | found).items())
        environment = "".join(lines)
        remote.run(in_folder(inventory, "mkdir -p run log\n"))
        remote.put(environment.encode(), f"{inventory.folder}/{services.ENV_FILE}")
        remote.put(yaml.safe_dump(dict(settings)).encode(), f"{inventory.folder}/{_CONFIG}")
        remote.put(plan.encode() + b"\n", f"{inventory.folder}/{PLAN}")
        return "configured"

    fleet.on_all("configure", one)


def entry_command(inventory: Inventory, verb: str) -> list[str]:
    """``cloverinfer VERB`` as the head's service, where the inventory says."""
    command = [PYTHON, "-m", "cloverinfer.cli", verb, "--config", _CONFIG]
    command += ["--port", str(inventory.port)]
    if "host" not in inventory.settings.get("server", {}):
        command += ["--host", inventory.head.address]
    return command


def entry_url(inventory: Inventory) -> str:
    """Where requests go."""
    server = inventory.settings.get("server", {})
    host = server.get("host", inventory.head.address)
    host = inventory.head.address if host in ("0.0.0.0", "::") else host
    scheme = "https" if server.get("ssl_certfile") else "http"
    return f"{scheme}://{place_of(host, inventory.port)}"


def url_of(address: str, port: int) -> str:
    return f"http://{place_of(address, port)}"


def place_of(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def start(inventory: Inventory, remote: Remote, name: str, command: list[str]) -> str:
    """Starts one service on one host."""
    return remote.run(in_folder(inventory, services.start(name, command))).strip()


def await_service(fleet: Fleet, remote: Remote, name: str, url: str) -> str:
    """Waits until the service answers at the URL; fails as soon as it has ended."""
    seconds = fleet.inventory.start_timeout
    command = f'{ON_HOST} ready {url} {seconds:g} "$PWD/{name}"\n'
    return remote.run(in_folder(fleet.inventory, command), seconds + 60.0).strip()


def prove(fleet: Fleet, remote: Remote, words: str) -> str:
    """Runs a proof on the head, with the services' environment."""
    command = f"set -a; . ./{services.ENV_FILE}; {ON_HOST} {words}\n"
    return remote.run(in_folder(fleet.inventory, command), 1800.0).strip()


def stop(fleet: Fleet) -> None:
    """Ends all services on all hosts; every host is tried before a failure is told."""
    failed = ""
    head = [fleet.inventory.head]
    stages = (("stop the entry", services.stop(ENTRIES), head),
              ("stop the rest", _stop_script(), fleet.inventory.hosts))  # fmt: skip
    for title, script, hosts in stages:
        try:
            fleet.on_all(
                title, lambda remote, script=script: _stop_one(fleet, remote, script), hosts
            )
        except FleetError as problem:
            failed = str(problem)
    if failed:
        raise FleetError(failed)


def _stop_script() -> str:
    after = f"""
if [ -s {RAY_FOLDER} ]; then
  case $(cat {RAY_FOLDER}) in /tmp/clover-ray-*) rm -rf "$(cat {RAY_FOLDER})";; esac
fi
rm -f {RAY_FOLDER} {PLAN} {services.ENV_FILE} {_CONFIG}"""
    return services.stop([*ENTRIES, *OTHERS], after)


def _stop_one(fleet: Fleet, remote: Remote, script: str) -> str:
    folder = shlex.quote(fleet.inventory.folder)
    if not fleet.dry_run and remote.run(f"[ -d {folder} ] && echo there || true\n").strip() == "":
        return "nothing is installed"
    said = remote.run(in_folder(fleet.inventory, script), _STOP_LIMIT)
    return ", ".join(said.splitlines()) or "nothing ran"


def status(fleet: Fleet) -> None:
    """Versions and what runs, host by host."""
    script = f"{PYTHON} -c 'import cloverinfer; print(cloverinfer.__version__)'\n"
    script += f'echo "$(cat {PLAN} 2>/dev/null)"\n{services.running()}'

    def one(remote: Remote) -> str:
        said = remote.run(in_folder(fleet.inventory, script))
        if fleet.dry_run:
            return ""
        version, plan, *listing = said.splitlines()
        runs = services.names_of("\n".join(listing))
        text = f"cloverinfer {version}, runs {' and '.join(runs) or 'nothing'}"
        return text + (f" ({counts_of(plan)})" if plan and runs else "") + skew(remote)

    fleet.on_all("status", one)
