"""Running nodes of this project: Ray on every host, the server on the head, requests as proof."""

from __future__ import annotations

import json
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping

from ..core.errors import ConfigError
from . import lifecycle, services
from .fleet import Fleet
from .inventory import Host, Inventory
from .lifecycle import ON_HOST, RAY, RAY_FOLDER, SERVER
from .remote import Remote
from .setup import PYTHON, in_folder

ROOM_SECONDS = 120
"""How long the server waits for all hosts to have joined Ray."""


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
    """Starts all, and ends when requests have gone through every node."""
    topology = topology_of(fleet.inventory, counts)
    lifecycle.begin(
        fleet,
        {"topology": topology, **counts},
        _check,
        lambda plan: _start(fleet, topology, counts, plan),
        lambda fleet, remote: lifecycle.prove(
            fleet, remote, f"prove {lifecycle.entry_url(fleet.inventory)}"
        ),
    )


def _check(fleet: Fleet, remote: Remote) -> str:
    inventory = fleet.inventory
    ports = [inventory.port, inventory.ray_port] if remote.host is inventory.head else []
    command = f"{ON_HOST} {lifecycle.check_command(fleet, remote, ports)}\n"
    return remote.run(in_folder(inventory, command)).strip()


def _start(fleet: Fleet, topology: str, counts: Mapping[str, int], plan: str) -> None:
    inventory = fleet.inventory
    folder = f"/tmp/clover-ray-{secrets.token_hex(4)}"

    def start_ray(remote: Remote) -> str:
        command = _ray_command(inventory, remote.host, _room_of(inventory, remote.host), folder)
        before = f"echo {folder} > {RAY_FOLDER}"
        return remote.run(in_folder(inventory, services.start(RAY, command, before))).strip()

    def start_server(remote: Remote) -> str:
        return lifecycle.start(
            inventory, remote, SERVER, _server_command(inventory, topology, counts)
        )

    lifecycle.configure(fleet, _variables(inventory), inventory.settings, plan)
    fleet.on_head("start Ray", start_ray)
    fleet.on_head("wait for Ray", lambda remote: _await_port(fleet, remote))
    if inventory.hosts[1:]:
        fleet.on_all("start Ray", start_ray, inventory.hosts[1:])
    fleet.on_head("start the server", start_server)
    url = f"{lifecycle.entry_url(inventory)}/ready"
    fleet.on_head(
        "wait for the server", lambda remote: lifecycle.await_service(fleet, remote, SERVER, url)
    )
    fleet.on_all("look at Ray", lambda remote: _still(fleet, remote))


def _variables(inventory: Inventory) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"{inventory.head.address}:{inventory.ray_port}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # deploy stop ends the server first
    }


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
    command = lifecycle.entry_command(inventory, "serve")
    command += ["--executor", "ray", "--topology", topology, "--room-timeout", str(ROOM_SECONDS)]
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


def _still(fleet: Fleet, remote: Remote) -> str:
    remote.run(in_folder(fleet.inventory, services.must_run(RAY)))
    return "runs"
