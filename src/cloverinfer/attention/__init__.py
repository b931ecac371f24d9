"""Attention over a paged KV cache: one contract, one file per backend."""

from .base import AttentionBackend, Capabilities
from .registry import auto_backend, backend_names, create_backend, gpus

__all__ = [
    "AttentionBackend",
    "Capabilities",
    "auto_backend",
    "backend_names",
    "create_backend",
    "gpus",
]
