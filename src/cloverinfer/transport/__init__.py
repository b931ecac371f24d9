"""The data plane: register memory, put ranges into a peer's, tell it; one file per wire."""

from .base import (
    Capabilities,
    DeviceMemory,
    Endpoint,
    Events,
    Peer,
    Put,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
)
from .registry import capabilities, create_endpoint, join, missing, transport_names

__all__ = [
    "Capabilities",
    "DeviceMemory",
    "Endpoint",
    "Events",
    "Peer",
    "Put",
    "Ranges",
    "Region",
    "RegionRef",
    "Slices",
    "Ticket",
    "capabilities",
    "create_endpoint",
    "join",
    "missing",
    "transport_names",
]
