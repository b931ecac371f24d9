"""Attention over a paged KV cache: one contract, one file per backend."""

from .base import AttentionBackend, Capabilities
from .registry import backend_names, create_backend

__all__ = ["AttentionBackend", "Capabilities", "backend_names", "create_backend"]
