"""The data plane: register memory, put ranges into a peer's, tell it; one file per wire."""

from .base import Capabilities, Endpoint, Events, Peer, Ranges, Region, RegionRef, Slices, Ticket
from .registry import create_endpoint, transport_names

__all__ = [
    "Capabilities",
    "Endpoint",
    "Events",
    "Peer",
    "Ranges",
    "Region",
    "RegionRef",
    "Slices",
    "Ticket",
    "create_endpoint",
    "transport_names",
]
