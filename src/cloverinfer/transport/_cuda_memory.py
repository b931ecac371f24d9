"""Memory as the cuda_ipc transport shares it: device regions offered to other processes, those of
others opened here, and host memory page-locked so that a device may read and write it.

An offer is a page of POSIX shared memory with an IPC handle in it. A handle names a whole
allocation; where the region begins in it is said beside. What is copied is not known here.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading

import numpy as np

from ..core.errors import TransportError
from ._cuda_driver import HANDLE_BYTES, Driver
from ._shm_files import create_segment, open_segment, unlink
from .base import DeviceMemory, RegionRef

REGION_NAME = re.compile(r"d\d+")
_STATE = struct.Struct("=I")
_OPEN, _TAKEN_BACK = 0x4E45504F, 0x45534C43
_OFFER = struct.Struct(f"=IQQQQ{HANDLE_BYTES}s")
"""State; pid of the owner, address there, offset in the allocation, bytes; the handle."""


class Offer:
    """A device region of this process, to be found by its segment's name until ``close``."""

    def __init__(self, driver: Driver, segment: str, memory: DeviceMemory) -> None:
        try:
            base, nbytes = driver.allocation(memory.pointer)
            offset = memory.pointer - base
            if offset + memory.nbytes > nbytes:
                raise ValueError(
                    f"{memory.nbytes} bytes reach outside their allocation of {nbytes} bytes: "
                    "what is shared is of one (PyTorch: without expandable segments)"
                )
            handle = driver.export(base)
        except TransportError as error:
            raise TransportError(
                f"this device memory cannot be shared with other processes ({error}): allocate it "
                "with cudaMalloc (PyTorch: without expandable segments)"
            ) from error
        self.memory = memory
        self._name = segment
        self._page = create_segment(segment, mmap.PAGESIZE)
        where = (memory.pointer, offset, memory.nbytes)
        _OFFER.pack_into(self._page, 0, _OPEN, os.getpid(), *where, handle)

    def close(self) -> None:
        _STATE.pack_into(self._page, 0, _TAKEN_BACK)
        unlink(self._name)


class _Opened:
    """Allocations of other processes that are open in this one: the driver opens each once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[tuple[bytes, int], tuple[int, int]] = {}
        """Handle and context to the address here, and how many hold it."""

    def take(self, driver: Driver, context: int, handle: bytes) -> int:
        with self._lock:
            pointer, holders = self._held.get((handle, context), (0, 0))
            if not holders:
                with driver.current(context):
                    pointer = driver.open(handle)
            self._held[handle, context] = pointer, holders + 1
            return pointer

    def give_back(self, driver: Driver, context: int, handle: bytes) -> None:
        with self._lock:
            pointer, holders = self._held.pop((handle, context))
            if holders > 1:
                self._held[handle, context] = pointer, holders - 1
                return
            with driver.current(context):
                driver.close(pointer)


_opened = _Opened()


class DeviceTarget:
    """A peer's device region in this process, as seen from one context."""

    def __init__(self, driver: Driver, context: int, prefix: str, ref: RegionRef) -> None:
        self._driver, self._context = driver, context
        self._page = open_segment(f"{prefix}-{ref.name}")
        if len(self._page) < _OFFER.size:
            raise TransportError(f"region {ref.name} of {ref.address} is none")
        _, pid, pointer, offset, nbytes, handle = _OFFER.unpack_from(self._page)
        if nbytes < ref.nbytes:
            raise TransportError(f"region {ref.name} of {ref.address} is smaller than promised")
        if not self.open:
            raise TransportError(f"region {ref.name} of {ref.address} is closed")
        # A process cannot open what it has exported itself, and need not.
        self._handle = b"" if pid == os.getpid() else handle
        if self._handle:
            pointer = _opened.take(driver, context, handle) + offset
        self.pointer = pointer

    @property
    def open(self) -> bool:
        return bool(_STATE.unpack_from(self._page)[0] == _OPEN)

    def close(self) -> None:
        """Calling it twice is fine; nothing may be under way to it."""
        handle, self._handle = self._handle, b""
        if handle:
            _opened.give_back(self._driver, self._context, handle)


class Pins:
    """Host memory that devices may read and write, by name; each must be given back before its
    memory is unmapped, which holding it here sees to.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._held: dict[str, tuple[memoryview | mmap.mmap, int, int]] = {}
        self._lock = threading.Lock()

    def pin(self, name: str, memory: memoryview | mmap.mmap, nbytes: int, context: int) -> int:
        """The device address of its first ``nbytes`` bytes."""
        with self._lock:
            if name not in self._held:
                address = np.frombuffer(memory, np.uint8).ctypes.data
                with self._driver.current(context):
                    self._held[name] = memory, address, self._driver.pin(address, nbytes)
            return self._held[name][2]

    def names(self) -> list[str]:
        return list(self._held)

    def unpin(self, name: str, context: int) -> None:
        with self._lock:
            held = self._held.pop(name, None)
            if held is not None:
                with self._driver.current(context):
                    self._driver.unpin(held[1])
