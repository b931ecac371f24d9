"""Device memory for tests: of a real device where there is one, and of a fake driver.

The fake does on a thread per stream what a device would, to host memory: in order, later than it
was asked for, and not at all while ``held`` or once it has failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import queue
import struct
import threading
from collections.abc import Callable, Iterator
from ctypes import c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np

from cloverinfer.core.errors import TransportError
from cloverinfer.transport import DeviceMemory
from cloverinfer.transport._cuda_driver import HANDLE_BYTES, Driver


class FakeStream:
    def __init__(self, driver: FakeDriver) -> None:
        self.work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._driver = driver
        self._pending = 0
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object]) -> None:
        with self._changed:
            self._pending += 1
        self.work.put(work)

    def idle(self, timeout: float = 0.0) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending, timeout)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            self._driver.going.wait(60)
            if not self._driver.failed:
                work()
            with self._changed:
                self._pending -= 1
                self._changed.notify_all()

    def end(self) -> None:
        self.work.put(None)
        self._thread.join(60)


class FakeDriver(Driver):
    """See ``Driver``. Once ``failed`` its streams do nothing more, and who looks at one hears why.

    Its memory is the process's own: what a stream writes after that was unmapped ends the process,
    so ``unpin`` asserts that no stream has anything left to do.
    """

    def __init__(self, devices: int = 2) -> None:
        self.devices = devices
        self.going = threading.Event()
        self.going.set()
        self.failed = False
        self.calls: list[str] = []
        self.pinned: dict[int, int] = {}
        self.opened: dict[int, int] = {}
        self.retained = 0
        self._contexts = threading.local()
        self._memory: dict[int, np.ndarray] = {}
        self._events: dict[int, threading.Event] = {}
        self._streams: dict[int, FakeStream] = {}
        self._numbers = itertools.count(1)

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Streams stand still."""

        @contextlib.contextmanager
        def hold() -> Iterator[None]:
            self.going.clear()
            try:
                yield
            finally:
                self.going.set()

        return hold()

    def device_count(self) -> int:
        return self.devices

    def reaches(self, device: int, other: int) -> bool:
        return True

    def retain(self, device: int) -> int:
        self.retained += 1
        return 1000 + device

    def release(self, device: int) -> None:
        self.retained -= 1

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        former = getattr(self._contexts, "now", None)
        self._contexts.now = context
        try:
            yield
        finally:
            self._contexts.now = former

    def _needs_context(self) -> None:
        assert getattr(self._contexts, "now", None) is not None, "no context is current"

    def allocation(self, pointer: int) -> tuple[int, int]:
        self._needs_context()
        for base, memory in self._memory.items():
            if base <= pointer < base + memory.nbytes:
                return base, memory.nbytes
        raise TransportError("cuMemGetAddressRange: invalid argument (1)")

    def export(self, base: int) -> bytes:
        self._needs_context()
        return struct.pack("=Q", base).ljust(HANDLE_BYTES, b"h")

    def open(self, handle: bytes) -> int:
        self._needs_context()
        (base,) = struct.unpack_from("=Q", handle)
        self.opened[base] = self.opened.get(base, 0) + 1
        return int(base)

    def close(self, pointer: int) -> None:
        self.opened[pointer] -= 1

    def pin(self, address: int, nbytes: int) -> int:
        self._needs_context()
        assert address not in self.pinned
        self.pinned[address] = nbytes
        return address

    def unpin(self, address: int) -> None:
        assert all(stream.idle(60) for stream in self._streams.values()), "a device may write there"
        del self.pinned[address]

    def make_stream(self) -> int:
        self._needs_context()
        number = next(self._numbers)
        self._streams[number] = FakeStream(self)
        return number

    def destroy_stream(self, stream: int) -> None:
        self._streams.pop(stream).end()

    def idle(self, stream: int) -> bool:
        if self.failed:
            raise TransportError("cuStreamQuery: an illegal memory access (700)")
        return self._streams[stream].idle()

    def wait_event(self, stream: int, event: int) -> None:
        self._streams[stream].add(lambda: self._events[event].wait(60))

    def write_flag(self, stream: int, pointer: int, value: int) -> None:
        self._needs_context()
        word = ctypes.c_uint32.from_address(pointer)
        self._streams[stream].add(lambda: setattr(word, "value", value))

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._needs_context()
        self.calls.append("copy")
        if self._on_host(target) and self._on_host(source):
            raise AssertionError("a copy between host memories would wait for the stream")
        self._streams[stream].add(lambda: ctypes.memmove(target, source, nbytes))

    def _on_host(self, address: int) -> bool:
        return any(first <= address < first + size for first, size in self.pinned.items())

    def copy_many(self, stream: int, targets: Any, sources: Any, sizes: Any) -> None:
        self._needs_context()
        self.calls.append("copy")
        rows = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self._streams[stream].add(lambda: [ctypes.memmove(*row) for row in rows])

    def load(self, text: str) -> int:
        assert ".entry copy_pieces" in text
        return 1

    def unload(self, module: int) -> None:
        assert module == 1

    def function(self, module: int, name: str) -> int:
        return 2

    def launch(self, stream: int, function: int, shape: tuple[int, int], *arguments: Any) -> None:
        self._needs_context()
        self.calls.append("launch")
        table, pieces, vectors, _ = (one.value for one in arguments)

        def run() -> None:  # reads the table when it runs, as the device does
            for i in range(pieces):
                target, source = (c_uint64.from_address(table + 16 * i + at).value for at in (0, 8))
                ctypes.memmove(target, source, vectors * 16)

        self._streams[stream].add(run)

    def make_memory(self, nbytes: int) -> int:
        self._needs_context()
        return self.allocate(nbytes).pointer

    def free_memory(self, pointer: int) -> None:
        del self._memory[pointer]

    # -- what tests do to the device

    def allocate(self, nbytes: int, device: int = 0) -> DeviceMemory:
        memory = np.zeros(nbytes + 64, np.uint8)
        base = memory.ctypes.data
        base += -base % 64
        self._memory[base] = memory[base - memory.ctypes.data :][:nbytes]
        return DeviceMemory(base, nbytes, device)

    def free(self, memory: DeviceMemory) -> None:
        self._memory.pop(memory.pointer, None)

    def read(self, pointer: int, nbytes: int) -> np.ndarray:
        return np.frombuffer(ctypes.string_at(pointer, nbytes), np.uint8)

    def write(self, pointer: int, data: np.ndarray) -> None:
        ctypes.memmove(pointer, data.tobytes(), data.nbytes)

    def event(self) -> tuple[int, Callable[[], None]]:
        """An event that happens when the function is called."""
        number = next(self._numbers)
        self._events[number] = threading.Event()
        return number, self._events[number].set


class RealDriver(Driver):
    """A device, with what tests need beyond the transport."""

    def __init__(self) -> None:
        super().__init__()
        pointer = ctypes.POINTER(c_uint64)
        for name, arguments in {
            "cuMemAlloc_v2": [pointer, c_size_t],
            "cuMemFree_v2": [c_uint64],
            "cuMemsetD8_v2": [c_uint64, ctypes.c_ubyte, c_size_t],
            "cuMemcpyHtoD_v2": [c_uint64, c_void_p, c_size_t],
            "cuMemcpyDtoH_v2": [c_void_p, c_uint64, c_size_t],
            "cuEventCreate": [ctypes.POINTER(c_void_p), c_uint],
            "cuEventRecord": [c_void_p, c_void_p],
            "cuStreamWaitValue32_v2": [c_void_p, c_uint64, c_uint, c_uint],
            "cuStreamSynchronize": [c_void_p],
        }.items():
            getattr(self._cuda, name).argtypes = arguments
        self.context = self.retain(0)
        self._words: list[np.ndarray] = []

    def allocate(self, nbytes: int, device: int = 0) -> DeviceMemory:
        at = c_uint64()
        with self.current(self.context):
            self._call("cuMemAlloc_v2", ctypes.byref(at), nbytes)
            self._call("cuMemsetD8_v2", at.value, 0, nbytes)
            self._call("cuStreamSynchronize", None)  # of these calls alone
        return DeviceMemory(at.value, nbytes, device)

    def free(self, memory: DeviceMemory) -> None:
        with self.current(self.context):
            self._call("cuMemFree_v2", memory.pointer)

    def read(self, pointer: int, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        with self.current(self.context):
            self._call("cuMemcpyDtoH_v2", data.ctypes.data, pointer, nbytes)
        return data

    def write(self, pointer: int, data: np.ndarray) -> None:
        data = np.ascontiguousarray(data)
        with self.current(self.context):
            self._call("cuMemcpyHtoD_v2", pointer, data.ctypes.data, data.nbytes)
            self._call("cuStreamSynchronize", None)  # of these calls alone

    def event(self) -> tuple[int, Callable[[], None]]:
        # A page of its own: pages are pinned once.
        word = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint32)
        self._words.append(word)
        event = c_void_p()
        with self.current(self.context):
            at = self.pin(word.ctypes.data, word.nbytes)
            stream = self.make_stream()
            self._call("cuStreamWaitValue32_v2", stream, at, 1, 1)  # until equal
            self._call("cuEventCreate", ctypes.byref(event), 2)
            self._call("cuEventRecord", event, stream)
        assert event.value is not None
        return event.value, lambda: word.__setitem__(0, 1)


AnyDriver = FakeDriver | RealDriver
"""A driver that tests can ask for memory and events."""
