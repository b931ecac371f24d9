"""Which versions of vLLM the connector fits."""

from __future__ import annotations

import logging
import re

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


def check_version(version: str, base: type) -> None:
    """``base``: vLLM's own class of connectors. Warns of an unknown version; ``ConfigError`` for
    one that cannot work, with the reason."""
    known = re.match(r"(\d+)\.(\d+)", version)
    number = (int(known[1]), int(known[2])) if known else None
    lacking = [name for name in _NEEDED if not hasattr(base, name)]
    want = f"use vLLM {_text(OLDEST)} to {_text(NEWEST)}"
    if lacking:
        raise ConfigError(f"vLLM {version} has no {', '.join(lacking)} in its connectors: {want}")
    if number is not None and number < OLDEST:
        raise ConfigError(f"vLLM {version} is older than this connector's interface: {want}")
    if number is None or number > NEWEST:
        log.warning("vLLM %s is not known to this connector, which may not fit it", version)


def _text(number: tuple[int, int]) -> str:
    return ".".join(map(str, number))
