"""The memory that a check moves: this host's, or a GPU's. Patterns go in, and wrong bytes are
counted; nothing here knows a transport.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import DeadlineError, TransportError
from ..transport import Endpoint, Region
from ..transport._cuda_driver import Driver, load_library
from ..transport.base import DeviceMemory

Bytes = npt.NDArray[np.uint8]
_PATIENCE = 30.0
_NAP = 50e-6


class HostMemory:
    """A region of the endpoint's own."""

    def __init__(self, endpoint: Endpoint, nbytes: int) -> None:
        self.region: Region = endpoint.register(nbytes)
        self._bytes: Bytes = np.frombuffer(self.region.buffer, np.uint8)

    def write(self, data: Bytes) -> None:
        """At the beginning."""
        self._bytes[: len(data)] = data

    def wrong(self, expected: Bytes) -> int:
        """How many of the first bytes are not these."""
        return int((self._bytes[: len(expected)] != expected).sum())

    def close(self) -> None:
        """The endpoint gives its regions back."""


class GpuMemory:
    """A region over memory of a device, by its driver; ``TransportError`` where that fails."""

    def __init__(
        self, endpoint: Endpoint, nbytes: int, device: int, driver: Driver | None = None
    ) -> None:
        self._driver = driver or Driver()
        self._device = device
        self._context = self._driver.retain(device)
        self._pointer = self._stream = 0
        try:
            with self._driver.current(self._context):
                self._pointer = self._driver.make_memory(nbytes)
                self._stream = self._driver.make_stream()
            self.region: Region = endpoint.register(DeviceMemory(self._pointer, nbytes, device))
        except BaseException:
            self.close()
            raise

    def write(self, data: Bytes) -> None:
        data = np.ascontiguousarray(data)
        self._copy(self._pointer, data.ctypes.data, len(data))

    def wrong(self, expected: Bytes) -> int:
        found = np.empty_like(expected)
        self._copy(found.ctypes.data, self._pointer, len(found))
        return int((found != expected).sum())

    def close(self) -> None:
        """Once its endpoint is closed, which ends what may still read or write it."""
        with self._driver.current(self._context):
            if self._stream:
                self._driver.destroy_stream(self._stream)
            if self._pointer:
                self._driver.free_memory(self._pointer)
        self._pointer = self._stream = 0
        self._driver.release(self._device)

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        end = time.monotonic() + _PATIENCE
        with self._driver.current(self._context):
            self._driver.copy(self._stream, target, source, nbytes)
            while not self._driver.idle(self._stream):
                if time.monotonic() > end:
                    raise DeadlineError(f"the device has not copied within {_PATIENCE:.0f} s")
                time.sleep(_NAP)


def make_memory(endpoint: Endpoint, nbytes: int, device: int | None) -> HostMemory | GpuMemory:
    """``device`` None: this host's."""
    return HostMemory(endpoint, nbytes) if device is None else GpuMemory(endpoint, nbytes, device)


def num_gpus(driver: Any = None) -> int:
    """0 where there is no driver, or where it does not work."""
    if driver is None and load_library() is None:
        return 0
    try:
        return int((driver or Driver()).device_count())
    except TransportError:
        return 0
