"""Which versions of vLLM the connector fits."""

from __future__ import annotations

import inspect
import logging
import re
from typing import Any

from ...core.errors import ConfigError

log = logging.getLogger(__name__)
OLDEST, NEWEST = (0, 23), (0, 33)
"""Those whose connector interface was read; 0.32 is the one that the tests run."""
_NEEDED = (
    "bind_connector_metadata",
    "register_kv_caches",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "update_connector_output",
    "request_finished",
    "handle_preemptions",
    "shutdown",
)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_version(version: str, base: type, ours: type) -> None:
    """``base``: vLLM's own class of connectors; ``ours``: the one that stands for it. Warns of an
    unknown version; ``ConfigError`` for one that cannot work, with the reason."""
    known = re.match(r"(\d+)\.(\d+)", version)
    number = (int(known[1]), int(known[2])) if known else None
    lacking = [name for name in _NEEDED if not hasattr(base, name)]
    want = f"use vLLM {_text(OLDEST)} to {_text(NEWEST)}"
    if lacking:
        raise ConfigError(f"vLLM {version} has no {', '.join(lacking)} in its connectors: {want}")
    if number is not None and number < OLDEST:
        raise ConfigError(f"vLLM {version} is older than this connector's interface: {want}")
    wrong = [problem for name in vars(ours) if (problem := _misfit(name, base, ours))]
    if wrong:
        text = f"vLLM {version} calls this connector otherwise: {'; '.join(wrong)}"
        raise ConfigError(f"{text}: {want}")
    if number is None or number > NEWEST:
        log.warning("vLLM %s is not known to this connector, which may not fit it", version)


def _misfit(name: str, base: type, ours: type) -> str:
    """Why our method cannot be called as vLLM's is; empty where it can, or where vLLM has none."""
    theirs, mine = getattr(base, name, None), getattr(ours, name)
    if name.startswith("_") or not callable(theirs) or not callable(mine):
        return ""
    named = _parameters(theirs)
    if any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in named):
        return ""  # a version that passes on what it gets says nothing of how it calls
    positional = [each.name for each in named if each.kind in _POSITIONAL]
    keywords = [each.name for each in named if each.kind is inspect.Parameter.KEYWORD_ONLY]
    try:
        inspect.signature(mine).bind(*positional, **dict.fromkeys(keywords))
    except TypeError as problem:
        return f"{name}({', '.join(positional + keywords)}): {problem}"
    return ""


def _parameters(method: Any) -> list[inspect.Parameter]:
    return list(inspect.signature(method).parameters.values())


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
