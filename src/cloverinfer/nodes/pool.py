"""A node's pool as memory: where it lies, and whether peers can reach it there.

A pool in host memory is a region of the node's endpoint. One on a device is a region where the
transport takes such memory; where it does not, peers have nothing to do with the pool itself: what
comes is staged in host memory (``inlet``), and what goes is copied to a mirror (``source``).
"""

from __future__ import annotations

import logging

import torch

from ..attention.base import Capabilities
from ..core.errors import TransportError
from ..kvcache.layout import CANONICAL_LAYOUT, PoolLayout
from ..transport import Endpoint, Region, RegionRef
from ..transport.base import DeviceMemory
from .copies import Copies
from .source import Mirror, PoolSource, Source

log = logging.getLogger(__name__)


class Pool:
    """``buffer`` is what its attention backend is given; ``region`` what peers are, if anything."""

    def __init__(
        self, endpoint: Endpoint, layout: PoolLayout, copies: Copies, checksums: bool = False
    ) -> None:
        """``checksums``: of blocks, which are taken in host memory alone."""
        self.layout = layout
        self.copies = copies
        self.region: Region | None = None
        self.buffer: memoryview | DeviceMemory
        self._endpoint = endpoint
        if not copies.apart:
            self.region = endpoint.register(layout.total_bytes)
            self.buffer = self.region.buffer
            self._memory = torch.frombuffer(self.buffer, dtype=torch.uint8)
            return
        self._memory, self.buffer = copies.allocate(layout.total_bytes)
        if "cuda" in endpoint.capabilities.memory and not checksums:
            self.region = self._register(self.buffer)

    def _register(self, memory: memoryview | DeviceMemory) -> Region | None:
        try:
            return self._endpoint.register(memory)
        except TransportError as problem:
            log.warning(
                "%s cannot reach this pool on the device, so blocks are copied through host "
                "memory: %s",
                self._endpoint.capabilities.name,
                problem,
            )
            return None

    def regions(self) -> dict[str, RegionRef]:
        """As ``Node.regions``."""
        return {} if self.region is None else {"kv": self.region.ref}

    @property
    def host(self) -> memoryview:
        """Its bytes; empty where they are not the host's."""
        return memoryview(b"") if self.copies.apart else memoryview(self.buffer)  # type: ignore[arg-type]

    def layout_name(self, able: Capabilities) -> str:
        """Peers may put straight into pools of the canonical layout alone that they can reach."""
        if not able.direct_puts:
            return f"{able.name}'s own"
        return CANONICAL_LAYOUT if self.region is not None else f"{able.name}'s, staged"

    def rows(self, layer: int) -> torch.Tensor:
        """Bytes ``[blocks, size]`` of one layer."""
        layout, size = self.layout, self.layout.layer_block_bytes(layer)
        first = layout.layer_offsets[layer]
        return self._memory[first : first + size * layout.num_blocks].view(-1, size)

    def source(self, share: int) -> Source:
        """Where puts to one receiver read from; ``share``: bytes of host memory for a mirror."""
        if self.region is not None:
            return PoolSource(self.region, self.layout)
        return Mirror(self, self._endpoint.register, share)
