"""Memory of NVIDIA devices for network cards: through nvidia-peermem, or as dma-bufs.

With the kernel module ``nvidia-peermem`` a card registers a device's address as it does any other;
without it the driver exports a dma-buf, which kernels since 5.12 and rdma-core register. Knows no
card and no endpoint.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..core.errors import DeadlineError
from ._cuda_driver import Driver
from ._shared import seconds_left
from .base import DeviceMemory

PEERMEM, DMA_BUF = "nvidia-peermem", "dma-buf"
_NAP = 20e-6
"""Seconds between two looks at an event."""


def way_to_cards(root: Path = Path("/")) -> str:
    """How cards reach device memory here: ``PEERMEM`` where its module is loaded, else
    ``DMA_BUF``."""
    modules = root / "proc/modules"
    text = modules.read_text() if modules.exists() else ""
    # Underscores: the kernel's spelling of a module's name.
    loaded = any(line.startswith("nvidia_peermem ") for line in text.splitlines())
    return PEERMEM if loaded else DMA_BUF


def dma_buf_range(memory: DeviceMemory) -> tuple[int, int, int]:
    """First address and bytes of the whole pages that hold the memory, and where it begins in
    them."""
    page = mmap.PAGESIZE
    first = memory.pointer // page * page
    end = -(-(memory.pointer + memory.nbytes) // page) * page
    return first, end - first, memory.pointer - first


class CudaSide:
    """The devices whose memory an endpoint has; ``TransportError`` where there is no driver."""

    def __init__(self, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._contexts: dict[int, int] = {}
        self._lock = threading.Lock()

    def context(self, device: int) -> int:
        """The device's primary context, kept until ``close``."""
        with self._lock:
            if device not in self._contexts:
                self._contexts[device] = self._driver.retain(device)
            return self._contexts[device]

    @contextmanager
    def exported(self, memory: DeviceMemory) -> Iterator[tuple[int, int]]:
        """A dma-buf's file descriptor, for as long as it takes to register it, and where in it the
        memory begins."""
        first, nbytes, offset = dma_buf_range(memory)
        with self._driver.current(self.context(memory.device)):
            fd = self._driver.dma_buf(first, nbytes)
        try:
            yield fd, offset
        finally:
            os.close(fd)

    def wait(self, event: int, deadline: float) -> None:
        """Until the event has happened; ``DeadlineError`` where it has not by then."""
        with self._lock:
            context = next(iter(self._contexts.values()), None)
        with self._driver.current(self.context(0) if context is None else context):
            while not self._driver.happened(event):
                if seconds_left(deadline) <= 0:
                    raise DeadlineError("the device's event did not happen in time")
                time.sleep(_NAP)

    def close(self) -> None:
        with self._lock:
            for device in self._contexts:
                self._driver.release(device)
            self._contexts.clear()
