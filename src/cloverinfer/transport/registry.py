"""Transports by name; a transport's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..config.network import NetworkConfig
from ..core.errors import ConfigError
from .base import Capabilities, Endpoint

_CLASSES = {
    "inproc": "InprocEndpoint",
    "shm": "ShmEndpoint",
    "tcp": "TcpEndpoint",
    "ray": "RayEndpoint",
    "cuda_ipc": "CudaIpcEndpoint",
    "nixl": "NixlEndpoint",
    "rdma": "RdmaEndpoint",
    "null": "NullEndpoint",
}


def transport_names() -> list[str]:
    return list(_CLASSES)


def create_endpoint(transport: str, name: str, network: NetworkConfig | None = None) -> Endpoint:
    """An endpoint called ``name`` in logs; ``ConfigError`` for an unknown transport."""
    module = _module(transport)
    endpoint: Endpoint = getattr(module, _CLASSES[transport])(name, network or NetworkConfig())
    return endpoint


def missing(transport: str) -> str:
    """Why this host cannot use the transport; empty where it can."""
    return str(_module(transport).missing())


def join(transport: str) -> None:
    """Does what a process must have done before it has endpoints of a transport, where that is
    more than nothing; ``TransportError`` where it fails."""
    module = _module(transport)
    if hasattr(module, "join"):
        module.join()


def capabilities(transport: str) -> Capabilities:
    """What a transport can do, without an endpoint of it."""
    made: Capabilities = getattr(_module(transport), _CLASSES[transport]).capabilities
    return made


def _module(transport: str) -> ModuleType:
    if transport not in _CLASSES:
        raise ConfigError(f"unknown transport {transport!r}; known: {', '.join(_CLASSES)}")
    return importlib.import_module(f".{transport}", __package__)
