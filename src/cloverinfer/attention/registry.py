"""Backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ..core.errors import ConfigError
from .base import AttentionBackend

_CLASSES = {
    "torch": ("torch_backend", "TorchAttention"),
    "cpu": ("cpu", "CpuAttention"),
    "null": ("null", "NullAttention"),
}


def backend_names() -> list[str]:
    return list(_CLASSES)


def create_backend(name: str, threads: int = 1) -> AttentionBackend:
    """The backend called ``name`` with ``threads`` compute threads; ``ConfigError`` if unknown."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(_CLASSES)}")
    module, cls = _CLASSES[name]
    backend: AttentionBackend = getattr(importlib.import_module(f".{module}", __package__), cls)(
        threads
    )
    return backend
