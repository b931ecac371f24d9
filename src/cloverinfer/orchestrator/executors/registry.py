"""Executors by name; an executor's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ...core.errors import ConfigError
from .base import Executor

_CLASSES = {
    "local": ("local", "LocalExecutor"),
    "process": ("process", "ProcessExecutor"),
    "ray": ("ray_executor", "RayExecutor"),
}


def create_executor(name: str) -> Executor:
    if name not in _CLASSES:
        raise ConfigError(f"unknown executor {name!r}; known: {', '.join(_CLASSES)}")
    module, cls = _CLASSES[name]
    executor: Executor = getattr(importlib.import_module(f".{module}", __package__), cls)()
    return executor
