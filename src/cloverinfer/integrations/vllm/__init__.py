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
    try:
        from .connector import RDMAConnector
    except AttributeError as problem:  # which vLLM would take for a module without the class
        raise ImportError(f"the connector cannot be loaded: {problem}") from problem
    return RDMAConnector
