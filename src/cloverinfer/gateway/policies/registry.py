"""Policies by name, each imported when it is asked for."""

from __future__ import annotations

import importlib

from ...core.errors import ConfigError
from .base import Policy

_CLASSES = {
    "round_robin": "RoundRobin",
    "least_loaded": "LeastLoaded",
    "prefix_aware": "PrefixAware",
}


def policy_names() -> list[str]:
    return list(_CLASSES)


def create_policy(name: str) -> Policy:
    """A policy that has chosen nothing yet; ``ConfigError`` lists the known names."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(_CLASSES)}")
    module = importlib.import_module(f".{name}", __package__)
    policy: Policy = getattr(module, _CLASSES[name])()
    return policy
