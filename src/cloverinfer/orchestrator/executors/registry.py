"""Executors by name; an executor's module is imported when it is asked for."""

from __future__ import annotations

import importlib

from ...core.errors import ConfigError
from .base import Executor

_CLASSES = {
    "local": "LocalExecutor",
    "process": "ProcessExecutor",
    "ray": "RayExecutor",
}


def create_executor(name: str) -> Executor:
    if name not in _CLASSES:
        raise ConfigError(f"unknown executor {name!r}; known: {', '.join(_CLASSES)}")
    module = importlib.import_module(f".{name}", __package__)
    executor: Executor = getattr(module, _CLASSES[name])()
    return executor
