"""Transports by name; a transport's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ..core.errors import ConfigError
from .base import Endpoint

_CLASSES = {
    "inproc": ("inproc", "InprocEndpoint"),
    "shm": ("shm", "ShmEndpoint"),
    "ray": ("ray_transport", "RayEndpoint"),
    "null": ("null", "NullEndpoint"),
}


def transport_names() -> list[str]:
    return list(_CLASSES)


def create_endpoint(transport: str, name: str) -> Endpoint:
    """An endpoint called ``name`` in logs; ``ConfigError`` for an unknown transport."""
    if transport not in _CLASSES:
        raise ConfigError(f"unknown transport {transport!r}; known: {', '.join(_CLASSES)}")
    module, cls = _CLASSES[transport]
    endpoint: Endpoint = getattr(importlib.import_module(f".{module}", __package__), cls)(name)
    return endpoint
