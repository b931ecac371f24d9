"""Running instances of vLLM in pairs of prefill and decode, each with the KV connector and with a
``cloverinfer node`` that announces it, and ``cloverinfer orchestrate`` on the head before them.

Knows vLLM by its command line only.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from .. import __version__
from ..config.load import Settings
from ..core.errors import ConfigError
from . import lifecycle, services
from .fleet import Fleet
from .inventory import KV_PORTS, Host, Inventory
from .lifecycle import ON_HOST, ORCHESTRATOR
from .remote import Remote
from .setup import PYTHON, in_folder

SERVER = "vllm.entrypoints.openai.api_server"
CONNECTOR_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_FLAGS = {
    ("model", "dtype"): "--dtype",
    ("model", "max_model_len"): "--max-model-len",
    ("cache", "block_size"): "--block-size",
    ("cache", "gpu_memory_utilization"): "--gpu-memory-utilization",
    ("scheduler", "max_num_seqs"): "--max-num-seqs",
    ("scheduler", "max_num_batched_tokens"): "--max-num-batched-tokens",
    ("server", "served_model_name"): "--served-model-name",
}
"""Fields of the settings: what vLLM calls them."""
_ENTRY = ("server", "orchestrator")
"""Sections that are the orchestrator's."""


@dataclass(frozen=True)
class Instance:
    """One vLLM server. ``number``: its place among those of its host."""

    host: Host
    role: str
    number: int
    inventory: Inventory

    @property
    def service(self) -> str:
        return f"vllm-{self.number}"

    @property
    def node(self) -> str:
        """The service that announces it."""
        return f"node-{self.number}"

    @property
    def port(self) -> int:
        return self.inventory.vllm.port + self.number

    @property
    def kv_port(self) -> int:
        return self.inventory.vllm.kv_port + KV_PORTS * self.number

    @property
    def url(self) -> str:
        return lifecycle.url_of(self.host.address, self.port)


def placed(inventory: Inventory, counts: Mapping[str, int]) -> list[Instance]:
    """Instances of each role, spread over the hosts that have room; ``ConfigError`` where they
    lack it."""
    taken: Counter[str] = Counter()
    found = []
    for role, count in counts.items():
        if count < 1:
            raise ConfigError(f"{role} instances must be 1 or more, not {count}")
        if inventory.room(role) < count:
            raise ConfigError(
                f"the inventory has room for {inventory.room(role)} {role} instances, not {count}: "
                f"give more hosts the role {role}"
            )
        rooms = [
            (turn, place)
            for place, host in enumerate(inventory.hosts)
            for turn in range(host.roles.count(role))
        ]
        for _, place in sorted(rooms)[:count]:
            host = inventory.hosts[place]
            found.append(Instance(host, role, taken[host.name], inventory))
            taken[host.name] += 1
    return found


def run(fleet: Fleet, counts: Mapping[str, int]) -> None:
    """Starts all, and ends when prompts have gone from prefill to decode instances, and every
    instance has answered."""
    check_settings(fleet.inventory)
    instances = placed(fleet.inventory, counts)
    urls = shlex.join(one.url for one in instances)
    entry = lifecycle.entry_url(fleet.inventory)
    lifecycle.begin(
        fleet,
        {"mode": "vllm", **counts},
        lambda fleet, remote: _check(fleet, remote, instances),
        lambda plan: _start(fleet, instances, plan),
        lambda fleet, remote: lifecycle.prove(fleet, remote, f"prove-pairs {entry} {urls}"),
    )


def check_settings(inventory: Inventory) -> None:
    """``ConfigError`` for what would change nothing."""
    fields = [(section, name) for section, given in inventory.settings.items() for name in given]
    if ("model", "model_path") not in fields:
        raise ConfigError(
            "mode vllm needs the model's folder, the same on every host: set MODEL_NAME in the "
            ".env, or settings.model.model_path in the inventory"
        )
    if inventory.settings.get("orchestrator", {}).get("usage_stages") is False:
        raise ConfigError(
            "settings: orchestrator.usage_stages must stay on: by them deploy run knows that "
            "prompts come from prefill instances"
        )
    for section, name in fields:
        known = (section, name) in _FLAGS or section in _ENTRY or name == "model_path"
        if not known:
            raise ConfigError(
                f"settings: {section}.{name} changes nothing in mode vllm: give vLLM its own words "
                "by vllm.options"
            )


def _check(fleet: Fleet, remote: Remote, instances: list[Instance]) -> str:
    inventory = fleet.inventory
    here = [one for one in instances if one.host is remote.host]
    ports = [port for one in here for port in (one.port, one.kv_port)]
    if remote.host is inventory.head:
        ports.append(inventory.port)
    script = f"{ON_HOST} {lifecycle.check_command(fleet, remote, ports)}\n"
    if here:
        script += _check_vllm(inventory)
    return ", ".join(remote.run(in_folder(inventory, script)).splitlines())


def _check_vllm(inventory: Inventory) -> str:
    """vLLM is there with this package beside it, and so is the model."""
    venv, python = inventory.vllm.venv, shlex.quote(_python(inventory))
    model = inventory.settings["model"]["model_path"]
    script = f"""
[ -x {python} ] || fail "there is no environment {venv}: correct vllm.venv"
{python} -c 'import cloverinfer' 2> /dev/null \\
  || fail "vLLM's environment {venv} has no cloverinfer: run deploy push, or install \\
its wheel there"
{python} -m cloverinfer.deploy.on_host check-vllm {__version__}
"""
    if model.startswith(("/", ".", "~")):
        script += f'[ -e {shlex.quote(model)} ] || fail "there is no model "{shlex.quote(model)}\n'
    return script


def _start(fleet: Fleet, instances: list[Instance], plan: str) -> None:
    inventory = fleet.inventory
    hosts = [host for host in inventory.hosts if any(one.host is host for one in instances)]

    def here(remote: Remote) -> list[Instance]:
        return [one for one in instances if one.host is remote.host]

    def start_instances(remote: Remote) -> str:
        said = [
            lifecycle.start(inventory, remote, name, command)
            for one in here(remote)
            for name, command in ((one.service, vllm_command(one)), (one.node, node_command(one)))
        ]
        return ", ".join(said)

    def start_entry(remote: Remote) -> str:
        command = lifecycle.entry_command(inventory, "orchestrate")
        return lifecycle.start(inventory, remote, ORCHESTRATOR, command)

    def await_instances(remote: Remote) -> str:
        for one in here(remote):
            lifecycle.await_service(fleet, remote, one.service, f"{one.url}/health")
        for one in here(remote):
            remote.run(in_folder(inventory, services.must_run(one.node)))
        return "ready"

    lifecycle.configure(fleet, _variables(inventory), _entry_settings(inventory), plan)
    fleet.on_head("start the orchestrator", start_entry)
    fleet.on_all("start instances", start_instances, hosts)
    fleet.on_all("wait for instances", await_instances, hosts)
    url = f"{lifecycle.entry_url(inventory)}/ready"
    fleet.on_head(
        "wait for the orchestrator",
        lambda remote: lifecycle.await_service(fleet, remote, ORCHESTRATOR, url),
    )


def vllm_command(one: Instance) -> list[str]:
    """What starts an instance."""
    inventory = one.inventory
    settings = inventory.settings
    # Not `vllm serve`, which vLLM's builds for CPUs do not start: they have another name.
    command = [_python(inventory), "-m", SERVER]
    command += ["--model", settings["model"]["model_path"], "--host", one.host.address]
    command += ["--port", str(one.port), "--kv-transfer-config", json.dumps(_connector(one))]
    for (section, name), flag in _FLAGS.items():
        value = settings.get(section, {}).get(name)
        if value is not None:
            command += [flag, *map(str, value if isinstance(value, (list, tuple)) else [value])]
    return [*command, *inventory.vllm.options]


def _python(inventory: Inventory) -> str:
    return str(PurePosixPath(inventory.vllm.venv) / "bin" / "python")


def _connector(one: Instance) -> dict[str, Any]:
    place = {"kv_host": one.host.address, "kv_port": one.kv_port}
    return {
        "kv_connector": "RDMAConnector",
        "kv_connector_module_path": "cloverinfer.integrations.vllm",
        "kv_role": CONNECTOR_ROLES[one.role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": place | one.inventory.vllm.connector,
    }


def node_command(one: Instance) -> list[str]:
    """What announces an instance to the orchestrator."""
    command = [PYTHON, "-m", "cloverinfer.cli", "node", "--url", one.url, "--role", one.role]
    command += ["--orchestrator", lifecycle.entry_url(one.inventory)]
    if one.role == "decode":
        command += ["--kv-address", lifecycle.place_of(one.host.address, one.kv_port)]
    return command


def _variables(inventory: Inventory) -> dict[str, str]:
    """Secrets of this run's own: what instances announce themselves with, what their connectors
    prove to each other, and the key that keeps others than the orchestrator from instances."""
    key = inventory.environment.get("VLLM_API_KEY") or secrets.token_hex(32)
    return {
        "CLOVER_NETWORK_SECRET": secrets.token_hex(32),
        "CLOVER_ORCHESTRATOR_SECRET": secrets.token_hex(32),
        "CLOVER_ORCHESTRATOR_INSTANCE_API_KEY": key,
        "VLLM_API_KEY": key,
        "VLLM_NO_USAGE_STATS": "1",
    }


def _entry_settings(inventory: Inventory) -> Settings:
    settings = {name: dict(inventory.settings.get(name, {})) for name in _ENTRY}
    settings["server"].pop("served_model_name", None)  # it is vLLM's
    return settings
