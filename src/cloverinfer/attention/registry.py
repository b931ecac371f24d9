"""Backends by name; a backend's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from ..core.errors import ConfigError
from .base import AttentionBackend

_CLASSES = {
    "torch": "TorchAttention",
    "cpu": "CpuAttention",
    "cuda": "CudaAttention",
    "null": "NullAttention",
}


def backend_names() -> list[str]:
    return list(_CLASSES)


def auto_backend(device: str) -> str:
    """The backend for nodes whose tensors are on ``device`` (a torch device type)."""
    if device != "cuda":
        return "cpu"
    cuda = importlib.import_module(".cuda", __package__)
    return "cpu" if cuda.missing() else "cuda"


def gpus() -> tuple[int, str]:
    """GPUs of this host that nodes can compute on; where there are none, also why."""
    cuda = importlib.import_module(".cuda", __package__)
    reason: str = cuda.missing()
    return (0, reason) if reason else (cuda.count(), "")


def create_backend(
    name: str, threads: int = 1, batch_invariant: bool = False, prompt_attention: str = "auto"
) -> AttentionBackend:
    """The backend called ``name`` with ``threads`` compute threads; ``ConfigError`` if unknown.
    ``batch_invariant`` and ``prompt_attention`` mean something to ``cuda`` alone.
    """
    if name not in _CLASSES:
        raise ConfigError(f"unknown attention backend {name!r}; known: {', '.join(_CLASSES)}")
    module = importlib.import_module(f".{name}", __package__)
    make: Callable[..., AttentionBackend] = getattr(module, _CLASSES[name])
    if name == "cuda":
        return make(threads, batch_invariant, prompt_attention)
    return make(threads)
