"""Reads settings from a YAML file, ``CLOVER_*`` environment variables and overrides.

Sections are ``model``, ``cluster``, ``cache``, ``scheduler``, ``network``, ``chat``, ``server`` and
``orchestrator``; a variable is named ``CLOVER_<SECTION>_<FIELD>``. A file may also list several
``models``, each with sections of its own. Overrides (command-line flags) win over the environment,
which wins over the file, which wins over the defaults. Every value remembers where it came from, so
that an error can say so. What a field means stands in the records themselves;
nothing here knows any.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ..core.errors import ConfigError
from .cluster import TOPOLOGIES, CacheConfig, ClusterConfig, ModelConfig, SchedulerConfig
from .network import RDMA_DEVICES, NetworkConfig
from .orchestrator import OrchestratorConfig
from .server import ChatConfig, ServerConfig
from .yaml_file import read_yaml

log = logging.getLogger(__name__)
PREFIX = "CLOVER_"
NO_SETTINGS = frozenset(
    {"CLOVER_CACHE", "CLOVER_LOG_LEVEL", RDMA_DEVICES, "CLOVER_SERVICE", "CLOVER_VENV"}
)
"""Variables that are read elsewhere: a folder for models, the nodes' logs, a host's cards, and two
of deployments."""
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_|$)")
"""Variables that Kubernetes makes of the names of services, which may begin with ours."""
SECRETS = ("secret", "api_key")
"""Fields whose values no error shows."""
SECTIONS: dict[str, type[msgspec.Struct]] = {
    "model": ModelConfig,
    "cluster": ClusterConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "network": NetworkConfig,
    "chat": ChatConfig,
    "server": ServerConfig,
    "orchestrator": OrchestratorConfig,
}
MODELS = "models"
"""Key of a file's list of models, beside the sections."""
NODE_COUNTS = {
    "num_prefill_workers": ("prefill", ("pd", "pda")),
    "num_decode_dense_nodes": ("dense", ("pd", "pda")),
    "num_attention_nodes": ("attention", ("pda",)),
}
"""Count field: the role it counts, and the topologies that have nodes of that role."""

Settings = Mapping[str, Mapping[str, Any]]
"""Values by section and field."""
_Sourced = dict[str, dict[str, tuple[Any, str]]]
"""Values with where each came from, by section and field."""
STRINGS = tuple[str, ...]
"""The type of a field that takes several strings, or one."""
_S = TypeVar("_S", bound=msgspec.Struct)


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model with the nodes that serve it."""

    names: tuple[str, ...] = ()
    """Names that clients ask for; none: the model's own name."""
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    chat: ChatConfig = msgspec.field(default_factory=ChatConfig)


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a file, the environment and flags can set."""

    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
    chat: ChatConfig = msgspec.field(default_factory=ChatConfig)
    server: ServerConfig = msgspec.field(default_factory=ServerConfig)
    orchestrator: OrchestratorConfig = msgspec.field(default_factory=OrchestratorConfig)
    models: tuple[ServedModel, ...] = msgspec.field(default_factory=lambda: (ServedModel(),))
    """Those of the file's list, or the one that the sections describe."""


def load_config(
    path: str | os.PathLike[str] | None = None,
    overrides: Settings | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    defaults: Settings | None = None,
) -> Config:
    """The settings in force; ``environ`` is ``os.environ`` unless given.

    ``overrides`` win over all else. ``defaults`` replace the records' own defaults and count as
    not given. Raises ``ConfigError`` naming where the value came from, the key and what is allowed.
    """
    base = _sourced(defaults or {}, "default")
    file, entries = _read_file(Path(path)) if path is not None else ({}, [])
    given = [_sourced(file, str(path)), _sourced({}), _sourced(overrides or {}, "flag")]
    _merge_environment(given[1], os.environ if environ is None else environ)
    given = _without_outranked(given)
    whole = _served(base, given)
    server = _build(ServerConfig, "server", _over(base, given))
    models = [_entry(i, entry, str(path), base, given) for i, entry in enumerate(entries)]
    _check_names(models, server, str(path))
    return Config(
        model=whole.model,
        cluster=whole.cluster,
        chat=whole.chat,
        server=server,
        orchestrator=_build(OrchestratorConfig, "orchestrator", _over(base, given)),
        models=tuple(models) or (msgspec.structs.replace(whole, names=server.served_model_name),),
    )


def _sourced(settings: Settings, source: str = "") -> _Sourced:
    values: _Sourced = {section: {} for section in SECTIONS}
    _merge(values, settings, source)
    return values


def _over(base: _Sourced, given: Sequence[_Sourced]) -> _Sourced:
    """``base`` with what was given over it, later over earlier."""
    (values,) = _copies([base])
    for one in given:
        for section, fields in one.items():
            values[section].update(fields)
    return values


def _served(base: _Sourced, given: Sequence[_Sourced]) -> ServedModel:
    """The model that the sections describe."""
    values = _over(base, given)
    nested = {
        "cache": _build(CacheConfig, "cache", values),
        "scheduler": _build(SchedulerConfig, "scheduler", values),
        "network": _build(NetworkConfig, "network", values),
    }
    cluster = _build(ClusterConfig, "cluster", values, nested)
    counts = _over(_sourced({}), given)["cluster"]
    check_node_counts(cluster.topology, {key: source for key, (_, source) in counts.items()})
    return ServedModel(
        model=_build(ModelConfig, "model", values),
        cluster=cluster,
        chat=_build(ChatConfig, "chat", values),
    )


def _entry(i: int, entry: Any, path: str, base: _Sourced, given: Sequence[_Sourced]) -> ServedModel:
    """One model of a file's list: its sections win over the file's, flags and variables over
    both."""
    where = f"{path}: {MODELS}[{i}]"
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must hold a name and sections, not {entry!r}")
    sections = dict(entry)
    name = sections.pop("name", [])
    names = (name,) if isinstance(name, str) else tuple(name if isinstance(name, list) else (0,))
    if not all(isinstance(one, str) and one for one in names):
        raise ConfigError(f"{where}.name must be a string or a list of strings, not {name!r}")
    for one in ("server", "orchestrator"):
        if one in sections:
            raise ConfigError(f"{where}: {one} is a section of the whole file, not of one model")
    inner, *outer = given
    for layer in outer:
        if "model_path" in layer["model"]:
            source = layer["model"]["model_path"][1]
            text = f"model.model_path cannot be set where {path} lists {MODELS}"
            raise ConfigError(f"{source}: {text}")
    own = _sourced(_check_sections(where, sections), where)
    layers = _without_outranked([inner, own, *outer])
    return msgspec.structs.replace(_served(base, layers), names=names)


def _check_names(models: Sequence[ServedModel], server: ServerConfig, path: str) -> None:
    if models and server.served_model_name:
        raise ConfigError(
            f"server.served_model_name: {path} lists {MODELS}; give each a name of its own there"
        )
    seen: set[str] = set()
    for name in [name for one in models for name in one.names or (one.model.model_path,)]:
        if name in seen:
            raise ConfigError(f"{path}: two {MODELS} are named {name!r}; give each its own name")
        seen.add(name)


def check_node_counts(topology: str, given: Mapping[str, str]) -> None:
    """Refuses counts of nodes that ``topology`` does not have.

    ``given`` maps the cluster fields that were set on purpose to where each was set.
    """
    for field, (role, topologies) in NODE_COUNTS.items():
        if field in given and topology not in topologies:
            raise ConfigError(
                f"{_from(given[field])}cluster.{field}: topology {topology!r} has no {role} nodes "
                f"of its own; leave the count out or use {' or '.join(topologies)}"
            )


def _without_outranked(given: Sequence[_Sourced]) -> list[_Sourced]:
    """``given``, later over earlier, less the counts of nodes that a topology set over them does
    not have: a file's counts keep nobody from trying another topology. The log tells of them."""
    topologies = [one["cluster"].get("topology", (None, "")) for one in given]
    last = max((i for i, (value, _) in enumerate(topologies) if value in TOPOLOGIES), default=0)
    topology = topologies[last][0]
    kept = _copies(given)
    for layer in kept[:last]:
        for field, (role, having) in NODE_COUNTS.items():
            if field in layer["cluster"] and topology not in having:
                _, source = layer["cluster"].pop(field)
                told = f"{_from(source)}cluster.{field} changes nothing: topology {topology!r}"
                log.warning("%s, which is set over it, has no %s nodes of its own", told, role)
    return kept


def _copies(given: Sequence[_Sourced]) -> list[_Sourced]:
    return [{section: dict(fields) for section, fields in one.items()} for one in given]


def _read_file(path: Path) -> tuple[Settings, list[Any]]:
    """Its sections, and the entries of its list of models."""
    data = read_yaml(path)
    if data is None:
        return {}, []
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold sections ({', '.join(SECTIONS)}), not {data!r}")
    entries = data.pop(MODELS, None)
    if not isinstance(entries, list | None) or entries == []:
        raise ConfigError(f"{path}: {MODELS} must be a list of at least one, not {entries!r}")
    return _check_sections(str(path), data), entries or []


def _check_sections(where: str, data: Mapping[Any, Any]) -> Settings:
    sections = {}
    for section, fields in data.items():
        if section not in SECTIONS:
            raise ConfigError(_unknown_section(f"{where}: ", section))
        if not isinstance(fields, dict | None):
            raise ConfigError(f"{where}: section {section} must hold keys, not {fields!r}")
        sections[section] = fields or {}
    return sections


def _merge(into: _Sourced, settings: Settings, source: str) -> None:
    for section, fields in settings.items():
        if section not in SECTIONS:
            raise ConfigError(_unknown_section(_from(source), section))
        types = _field_types(section)
        for name, value in fields.items():
            if name not in types:
                raise ConfigError(_unknown_key(_from(source), section, name))
            _check_type(f"{_from(source)}{section}.{name}", value, types[name])
            into[section][name] = (value, source)


def _merge_environment(into: _Sourced, environ: Mapping[str, str]) -> None:
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in NO_SETTINGS:
            continue
        if _SERVICE_LINK.search(variable) or text.startswith(("tcp://", "udp://")):
            continue
        section, _, name = variable[len(PREFIX) :].lower().partition("_")
        if section not in SECTIONS:
            _tell_unknown(variable, section if name else "")
            continue
        types = _field_types(section)
        if not name:
            fields = ", ".join(f"{variable}_{field.upper()}" for field in types)
            raise ConfigError(f"{variable} names a section, not one of its settings: {fields}")
        if name not in types:
            raise ConfigError(_unknown_key(f"{variable}: ", section, name))
        into[section][name] = (_parse(variable, text, types[name]), variable)


def _tell_unknown(variable: str, section: str) -> None:
    """Other programs may have variables of this prefix, so only a slip of the pen in a section's
    name is an error; of the others the log tells."""
    close = difflib.get_close_matches(section, SECTIONS, 1, 0.75)
    if close:
        raise ConfigError(f"{variable}: unknown section {section!r}{hint(section, close)}")
    name = variable[len(PREFIX) :].lower()
    fields = [(one, field) for one in SECTIONS for field in _field_types(one)]
    near = difflib.get_close_matches(name, [field for _, field in fields], 1, 0.75)
    meant = [f"{PREFIX}{one}_{field}".upper() for one, field in fields if field in near]
    text = f"; did you mean {' or '.join(meant)}?" if meant else ""
    log.warning("%s is no setting of CloverInfer and changes nothing%s", variable, text)


def _field_types(section: str) -> dict[str, Any]:
    """Resolved types of the fields that a section sets; nested records are other sections."""
    fields = msgspec.structs.fields(SECTIONS[section])
    return {field.name: field.type for field in fields if field.name not in SECTIONS}


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, or the type itself."""
    return typing.get_args(kind) or (kind,)


def _describe(kind: Any) -> str:
    if kind == STRINGS:
        return "a string or a list of strings"
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return " or ".join(names.get(one, "none") for one in _alternatives(kind))


def _check_type(where: str, value: Any, kind: Any) -> None:
    if kind == STRINGS:
        many = value if isinstance(value, (list, tuple)) else [value]
        if not all(isinstance(one, str) for one in many):
            raise ConfigError(f"{where} must be {_describe(kind)}, not {value!r}")
        return
    allowed = _alternatives(kind)
    if float in allowed:
        allowed = (*allowed, int)
    # bool is an int to Python, but `port: yes` is no port.
    good = bool in allowed if isinstance(value, bool) else isinstance(value, allowed)
    if isinstance(value, float) and not math.isfinite(value):
        good = False
    if not good:
        secret = where.rpartition(".")[2].lower().endswith(SECRETS)
        given = f"a {type(value).__name__}" if secret else repr(value)
        raise ConfigError(f"{where} must be {_describe(kind)}, not {given}")


def _parse(variable: str, text: str, kind: Any) -> Any:
    """A variable's text as a value of the field's type."""
    if kind == STRINGS:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    allowed = _alternatives(kind)
    if type(None) in allowed and text.lower() in ("", "none", "null"):
        return None
    if bool in allowed and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for number in (int, float):
        if number in allowed:
            try:
                value = number(text)
            except ValueError:
                break
            _check_type(variable, value, kind)
            return value
    if str in allowed:
        return text
    raise ConfigError(f"{variable} must be {_describe(kind)}, not {text!r}")


_BOOLEANS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}


def _build(
    record: type[_S],
    section: str,
    values: _Sourced,
    nested: Mapping[str, msgspec.Struct] | None = None,
) -> _S:
    fields = values[section]
    arguments: dict[str, Any] = {name: value for name, (value, _) in fields.items()}
    try:
        return record(**arguments, **(nested or {}))
    except ConfigError as error:
        # The records' messages begin with the key; say where its value came from.
        name = str(error).partition(" ")[0].rpartition(".")[2]
        source = fields[name][1] if name in fields else ""
        raise ConfigError(f"{_from(source)}{error}") from error


def _from(source: str) -> str:
    return "" if source in ("", "flag", "default") else f"{source}: "


def _unknown_section(prefix: str, section: object) -> str:
    homes = [one for one in SECTIONS if section in _field_types(one)]
    if homes:
        sections = " or of ".join(homes)
        return f"{prefix}{section} is no section but a key of {sections}: put it there"
    return f"{prefix}unknown section {section!r}{hint(section, list(SECTIONS))}"


def _unknown_key(prefix: str, section: str, name: object) -> str:
    if name in SECTIONS:
        return f"{prefix}{name} is a section of its own, not a key of {section}"
    known = list(_field_types(section))
    return f"{prefix}unknown key {name!r} in section {section}{hint(str(name), known)}"


def hint(wrong: object, known: list[str]) -> str:
    """What to add to an error about an unknown name: the one probably meant, or all."""
    close = difflib.get_close_matches(str(wrong), known, 1)
    return f"; did you mean {close[0]}?" if close else f"; known are {', '.join(known)}"
