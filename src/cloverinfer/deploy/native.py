"""Running nodes of this project: Ray on every host, the server on the head, requests as proof."""

from __future__ import annotations

import json
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping

import yaml

from .. import __version__
from ..core.errors import ConfigError
from . import services
from .fleet import Fleet, FleetError
from .inventory import Host, Inventory
from .remote import Remote
from .setup import PYTHON, in_folder, skew

RAY, SERVER = "ray", "server"
ON_HOST = f"{PYTHON} -m cloverinfer.deploy.on_host"
ROOM_SECONDS = 120
"""How long the server waits for all hosts to have joined Ray."""
_STOP_LIMIT = 6.0 * services.STOP_SECONDS
"""Seconds for two services, each of which may ignore TERM, and for the looks at what is left."""
_PLAN = "run/plan"
_RAY_FOLDER = "run/ray-folder"


def topology_of(inventory: Inventory, counts: Mapping[str, int]) -> str:
    """The topology that has nodes of these roles; ``ConfigError`` where hosts lack room."""
    for role, count in counts.items():
        if count < 1:
            raise ConfigError(f"{role} nodes must be 1 or more, not {count}")
        if inventory.room(role) < count:
            raise ConfigError(
                f"the inventory has room for {inventory.room(role)} {role} nodes, not {count}: "
                f"give more hosts the role {role}"
            )
    return "pda" if "attention" in counts else "pd"


def run(fleet: Fleet, counts: Mapping[str, int]) -> None:
    """Starts all, and ends when requests have gone through every node. What this started is
    stopped again where something fails."""
    topology = topology_of(fleet.inventory, counts)
    plan = json.dumps({"topology": topology} | dict(counts), sort_keys=True)
    if _runs_already(fleet, plan):
        fleet.on_head("prove", lambda remote: _prove(fleet, remote))
        return
    fleet.on_all("check", lambda remote: _check(fleet, remote))
    try:
        _start(fleet, topology, counts, plan)
    except (FleetError, KeyboardInterrupt, SystemExit):  # SystemExit: SIGTERM
        fleet.say("== what was started is stopped again")
        stop(fleet)
        raise


def _runs_already(fleet: Fleet, plan: str) -> bool:
    """``FleetError`` where something else runs."""
    script = services.running([SERVER]) + f"cat {_PLAN} 2>/dev/null || true\n"
    said = fleet.on_head("look", lambda remote: remote.run(in_folder(fleet.inventory, script)))
    lines = said.splitlines()
    if not lines or lines[0] == f"{SERVER} 0":
        return False
    if lines[1:] != [plan]:
        raise FleetError(
            f"the server runs already, as {' '.join(lines[1:])}: run deploy stop first"
        )
    return True


def _check(fleet: Fleet, remote: Remote) -> str:
    host, inventory = remote.host, fleet.inventory
    command = f"{ON_HOST} check {host.address} {__version__} --gpus {host.gpus}"
    if host is inventory.head:
        command += f" --port {inventory.port} --port {inventory.ray_port}"
    for nic in host.nics:
        command += f" --nic {shlex.quote(nic)}"
    look = services.running([RAY])
    if f"{RAY} 0" not in remote.run(in_folder(inventory, look)) and not fleet.dry_run:
        # Left by a run that was broken off.
        remote.run(in_folder(inventory, _stop_script()), _STOP_LIMIT)
    return remote.run(in_folder(inventory, f"{command}\n")).strip() + skew(remote)


def _start(fleet: Fleet, topology: str, counts: Mapping[str, int], plan: str) -> None:
    inventory = fleet.inventory
    head, others = inventory.head, inventory.hosts[1:]
    environment = _environment(inventory)
    mark = secrets.token_hex(4)

    def configure(remote: Remote) -> str:
        remote.run(in_folder(inventory, "mkdir -p run log\n"))
        remote.put(environment, f"{inventory.folder}/{services.ENV_FILE}")
        settings = yaml.safe_dump(inventory.settings).encode()
        remote.put(settings, f"{inventory.folder}/run/config.yaml")
        remote.put(plan.encode() + b"\n", f"{inventory.folder}/{_PLAN}")
        return "configured"

    def start_ray(remote: Remote) -> str:
        folder = f"/tmp/clover-ray-{mark}"
        command = _ray_command(inventory, remote.host, _room_of(inventory, remote.host), folder)
        before = f"echo {folder} > {_RAY_FOLDER}"
        return remote.run(in_folder(inventory, services.start(RAY, command, before))).strip()

    def start_server(remote: Remote) -> str:
        command = _server_command(inventory, topology, counts)
        return remote.run(in_folder(inventory, services.start(SERVER, command))).strip()

    fleet.on_all("configure", configure)
    fleet.on_head("start Ray", start_ray)
    fleet.on_head("wait for Ray", lambda remote: _await_port(fleet, remote))
    if others:
        fleet.on_all("start Ray", start_ray, others)
    fleet.on_head("start the server", start_server)
    fleet.on_head("wait for the server", lambda remote: _await_server(fleet, remote))
    fleet.on_all("look at Ray", lambda remote: _still(fleet, remote))
    fleet.on_head("prove", lambda remote: _prove(fleet, remote))
    fleet.say(f"ready: http://{head.address}:{inventory.port}")


def _environment(inventory: Inventory) -> bytes:
    """Variables of every service, as a shell reads them."""
    addresses = ",".join([*(host.address for host in inventory.hosts), "127.0.0.1", "localhost"])
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"{inventory.head.address}:{inventory.ray_port}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # deploy stop ends the server first
        "no_proxy": addresses,
        "NO_PROXY": addresses,
        "no_grpc_proxy": addresses,
    }
    lines = [f"{k}={shlex.quote(v)}\n" for k, v in (variables | inventory.environment).items()]
    return "".join(lines).encode()


def _room_of(inventory: Inventory, host: Host) -> dict[str, int]:
    return {f"clover_{role}": count for role, count in Counter(host.roles).items()}


def _ray_command(
    inventory: Inventory, host: Host, room: Mapping[str, int], folder: str
) -> list[str]:
    command = [PYTHON, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += [f"--node-ip-address={host.address}", f"--resources={json.dumps(room)}"]
    if host is not inventory.head:
        return [*command, f"--address={inventory.head.address}:{inventory.ray_port}"]
    command += ["--head", f"--port={inventory.ray_port}", f"--temp-dir={folder}"]
    return [*command, "--include-dashboard=false"]


def _server_command(inventory: Inventory, topology: str, counts: Mapping[str, int]) -> list[str]:
    command = [PYTHON, "-m", "cloverinfer.cli", "serve", "--config", "run/config.yaml"]
    command += ["--executor", "ray", "--topology", topology]
    command += ["--room-timeout", str(ROOM_SECONDS), "--port", str(inventory.port)]
    if "host" not in inventory.settings.get("server", {}):
        command += ["--host", inventory.head.address]
    flags = {"prefill": "--prefill", "dense": "--dense", "decode": "--dense"}
    for role, count in counts.items():
        command += [flags.get(role, "--attention"), str(count)]
    return command


def _await_port(fleet: Fleet, remote: Remote) -> str:
    inventory = fleet.inventory
    where = f"({inventory.head.address!r}, {inventory.ray_port})"
    probe = f"import socket; socket.create_connection({where}, 2).close()"
    script = f"""turn=0
until {PYTHON} -c {shlex.quote(probe)} 2> /dev/null; do
  turn=$((turn + 1))
  [ $turn -lt 60 ] || fail "Ray does not listen: see log/{RAY}.log"
  sleep 0.5
done
echo listening
"""
    return remote.run(in_folder(inventory, script)).strip()


def _await_server(fleet: Fleet, remote: Remote) -> str:
    inventory, seconds = fleet.inventory, fleet.inventory.start_timeout
    command = f'{ON_HOST} ready {_base_url(inventory)}/ready {seconds:g} "$PWD/{SERVER}"\n'
    return remote.run(in_folder(inventory, command), seconds + 60.0).strip()


def _still(fleet: Fleet, remote: Remote) -> str:
    remote.run(in_folder(fleet.inventory, services.must_run(RAY)))
    return "runs"


def _prove(fleet: Fleet, remote: Remote) -> str:
    command = f"set -a; . ./{services.ENV_FILE}; {ON_HOST} prove {_base_url(fleet.inventory)}\n"
    return remote.run(in_folder(fleet.inventory, command), 1800.0).strip()


def _base_url(inventory: Inventory) -> str:
    host = inventory.settings.get("server", {}).get("host", inventory.head.address)
    host = inventory.head.address if host in ("0.0.0.0", "::") else host
    return f"http://[{host}]:{inventory.port}" if ":" in host else f"http://{host}:{inventory.port}"


def stop(fleet: Fleet) -> None:
    """Ends all services on all hosts; every host is tried before a failure is told."""
    failed = ""
    server = services.stop([SERVER])
    stages = (("stop the server", server, [fleet.inventory.head]),
              ("stop Ray", _stop_script(), fleet.inventory.hosts))  # fmt: skip
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
if [ -s {_RAY_FOLDER} ]; then
  case $(cat {_RAY_FOLDER}) in /tmp/clover-ray-*) rm -rf "$(cat {_RAY_FOLDER})";; esac
fi
rm -f {_RAY_FOLDER} {_PLAN} {services.ENV_FILE}"""
    return services.stop([SERVER, RAY], after)


def _stop_one(fleet: Fleet, remote: Remote, script: str) -> str:
    folder = shlex.quote(fleet.inventory.folder)
    if not fleet.dry_run and remote.run(f"[ -d {folder} ] && echo there || true\n").strip() == "":
        return "nothing is installed"
    said = remote.run(in_folder(fleet.inventory, script), _STOP_LIMIT)
    return ", ".join(said.split("\n")[:-1]) or "nothing ran"


def status(fleet: Fleet) -> None:
    """Versions and what runs, host by host."""
    script = services.running([RAY, SERVER])
    script += f"{PYTHON} -c 'import cloverinfer; print(cloverinfer.__version__)'\n"
    script += f"cat {_PLAN} 2>/dev/null || true\n"

    def one(remote: Remote) -> str:
        lines = remote.run(in_folder(fleet.inventory, script)).splitlines()
        if fleet.dry_run:
            return ""
        ray, server, version, *plan = lines
        runs = [name for line in (ray, server) for name, n in [line.split()] if n != "0"]
        text = f"cloverinfer {version}, runs {' and '.join(runs) or 'nothing'}"
        return text + (f" {plan[0]}" if plan and runs else "") + skew(remote)

    fleet.on_all("status", one)
