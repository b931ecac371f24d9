"""Transports by name; a transport's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ..core.errors import ConfigError
from .base import Endpoint

_CLASSES = {
    "inproc": "InprocEndpoint",
    "shm": "ShmEndpoint",
    "ray": "RayEndpoint",
    "null": "NullEndpoint",
}


def transport_names() -> list[str]:
    return list(_CLASSES)


def create_endpoint(transport: str, name: str) -> Endpoint:
    """An endpoint called ``name`` in logs; ``ConfigError`` for an unknown transport."""
    if transport not in _CLASSES:
        raise ConfigError(f"unknown transport {transport!r}; known: {', '.join(_CLASSES)}")
    module = importlib.import_module(f".{transport}", __package__)
    endpoint: Endpoint = getattr(module, _CLASSES[transport])(name)
    return endpoint
