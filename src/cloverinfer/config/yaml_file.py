"""Reads one YAML file, strictly; knows nothing of what it means."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from ..core.errors import ConfigError


def read_yaml(path: Path) -> Any:
    """What the file holds, None where it is empty; ``ConfigError`` where it is not YAML."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from error
    try:
        return yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, TypeError, RecursionError) as error:
        # TypeError: a list or a mapping as a key; RecursionError: nested without end.
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is not valid YAML: {reason}") from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen and key_node.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(key_node.value if isinstance(key_node.value, str) else id(key_node))
        return super().construct_mapping(node, deep)
