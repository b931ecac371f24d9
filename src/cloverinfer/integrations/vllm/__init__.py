"""The vLLM KV connector. vLLM loads ``RDMAConnector`` from here by its own switch.

Everything but the facade (``connector``) knows vLLM by the shape of its objects only, and is
imported and tested without it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["RDMAConnector"]


def __getattr__(name: str) -> Any:
    """Imports the facade, and with it vLLM, when it is asked for."""
    if name != "RDMAConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .connector import RDMAConnector

    return RDMAConnector
