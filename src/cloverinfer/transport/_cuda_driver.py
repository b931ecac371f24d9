"""CUDA's driver API, as far as the cuda_ipc and rdma transports need it, through ``libcuda.so.1``.

No toolkit is needed to build or install: the library comes with the driver and is loaded when a
``Driver`` is made. Contexts are the devices' primary ones, which PyTorch uses too, so pointers and
events of both mean the same. Which copies to make, and when, is not known here.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import TransportError

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_NOT_READY = 600
_LAZY_PEER_ACCESS = 1
_PORTABLE, _MAPPED = 1, 2
_NON_BLOCKING = 1
_SOURCE_ORDER_STREAM = 1
_POINTER = c_uint64


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", c_char * HANDLE_BYTES)]


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes: how sources are read, hints of where both sides are, flags."""

    _fields_ = [("order", c_int), ("hints", c_int * 4), ("flags", c_uint)]


_FUNCTIONS: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuGetErrorString": [c_int, POINTER(ctypes.c_char_p)],
    "cuDeviceGetCount": [POINTER(c_int)],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDeviceCanAccessPeer": [POINTER(c_int), c_int, c_int],
    "cuDevicePrimaryCtxRetain": [POINTER(c_void_p), c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxPushCurrent_v2": [c_void_p],
    "cuCtxPopCurrent_v2": [POINTER(c_void_p)],
    "cuMemAlloc_v2": [POINTER(_POINTER), c_size_t],
    "cuMemFree_v2": [_POINTER],
    "cuMemGetAddressRange_v2": [POINTER(_POINTER), POINTER(c_size_t), _POINTER],
    "cuIpcGetMemHandle": [POINTER(_IpcHandle), _POINTER],
    "cuIpcOpenMemHandle_v2": [POINTER(_POINTER), _IpcHandle, c_uint],
    "cuIpcCloseMemHandle": [_POINTER],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [POINTER(_POINTER), c_void_p, c_uint],
    "cuStreamCreate": [POINTER(c_void_p), c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamQuery": [c_void_p],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuEventQuery": [c_void_p],
    "cuStreamWriteValue32_v2": [c_void_p, _POINTER, c_uint, c_uint],
    "cuMemcpyAsync": [_POINTER, _POINTER, c_size_t, c_void_p],
    "cuModuleLoadData": [POINTER(c_void_p), ctypes.c_char_p],
    "cuModuleUnload": [c_void_p],
    "cuModuleGetFunction": [POINTER(c_void_p), c_void_p, ctypes.c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, POINTER(c_void_p), c_void_p],
}
_DMA_BUF = "cuMemGetHandleForAddressRange"
"""Since CUDA 11.7; where it is missing, no dma-buf can be exported."""
_DMA_BUF_FD = 1
_BATCH = "cuMemcpyBatchAsync"
"""Since CUDA 12.8; where it is missing, pieces are copied by one call each."""
_BATCH_ARGUMENTS = [c_void_p] * 3 + [c_size_t, c_void_p, c_void_p, c_size_t, c_void_p, c_void_p]


def load_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


class Driver:
    """``TransportError`` where a call fails, also where there is no driver. Every call but those
    on devices and ``current`` wants a context to be current.
    """

    def __init__(self) -> None:
        library = load_library()
        if library is None:
            raise TransportError(f"{_LIBRARY} is missing: install NVIDIA's driver")
        try:
            for name, arguments in _FUNCTIONS.items():
                getattr(library, name).argtypes = arguments
        except AttributeError as error:
            raise TransportError(f"NVIDIA's driver is too old: {error}") from error
        self._cuda: Any = library
        self._batch = getattr(library, _BATCH, None)
        if self._batch is not None:
            self._batch.argtypes = _BATCH_ARGUMENTS
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(getattr(self._cuda, name)(*arguments), name)

    def _check(self, status: int, name: str) -> None:
        if status != 0:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, byref(text))
            reason = text.value.decode() if text.value else "unknown error"
            raise TransportError(f"{name}: {reason} ({status})")

    def device_count(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        return count.value

    def reaches(self, device: int, other: int) -> bool:
        """Whether a device can read and write the other's memory."""
        can = c_int()
        pair = self._device(device), self._device(other)
        self._call("cuDeviceCanAccessPeer", byref(can), *pair)
        return bool(can.value)

    def retain(self, device: int) -> int:
        """The primary context of a device, made if need be, until ``release``."""
        context = c_void_p()
        self._call("cuDevicePrimaryCtxRetain", byref(context), self._device(device))
        assert context.value is not None
        return context.value

    def release(self, device: int) -> None:
        self._call("cuDevicePrimaryCtxRelease_v2", self._device(device))

    def _device(self, index: int) -> int:
        device = c_int()
        self._call("cuDeviceGet", byref(device), index)
        return device.value

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Makes a context this thread's current one, and the former one after."""
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            former = c_void_p()
            self._call("cuCtxPopCurrent_v2", byref(former))

    # -- memory

    def make_memory(self, nbytes: int) -> int:
        pointer = _POINTER()
        self._call("cuMemAlloc_v2", byref(pointer), nbytes)
        return pointer.value

    def free_memory(self, pointer: int) -> None:
        self._call("cuMemFree_v2", pointer)

    def allocation(self, pointer: int) -> tuple[int, int]:
        """First address and size in bytes of the allocation that a pointer lies in."""
        base, nbytes = _POINTER(), c_size_t()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), pointer)
        return base.value, nbytes.value

    def export(self, base: int) -> bytes:
        """What another process opens the allocation with."""
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), base)
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Where another process's allocation is here."""
        pointer = _POINTER()
        opened = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(pointer), opened, _LAZY_PEER_ACCESS)
        return pointer.value

    def close(self, pointer: int) -> None:
        self._call("cuIpcCloseMemHandle", pointer)

    def dma_buf(self, pointer: int, nbytes: int) -> int:
        """A file descriptor, the caller's, of the dma-buf over memory of a device; both numbers
        are multiples of the page size."""
        export = getattr(self._cuda, _DMA_BUF, None)
        if export is None:
            raise TransportError("NVIDIA's driver exports no dma-bufs: install 515 or newer")
        fd = c_int(-1)
        export.argtypes = [c_void_p, _POINTER, c_size_t, c_int, ctypes.c_ulonglong]
        self._check(export(byref(fd), pointer, nbytes, _DMA_BUF_FD, 0), _DMA_BUF)
        return fd.value

    def pin(self, address: int, nbytes: int) -> int:
        """Page-locks host memory for every context; returns its device address."""
        self._call("cuMemHostRegister_v2", address, nbytes, _PORTABLE | _MAPPED)
        pointer = _POINTER()
        self._call("cuMemHostGetDevicePointer_v2", byref(pointer), address, 0)
        return pointer.value

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", address)

    # -- what happens in order on a stream

    def make_stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), _NON_BLOCKING)
        assert stream.value is not None
        return stream.value

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def idle(self, stream: int) -> bool:
        """Whether all is done; ``TransportError`` for what went wrong on the device."""
        status = self._cuda.cuStreamQuery(stream)
        if status == _NOT_READY:
            return False
        self._check(status, "cuStreamQuery")
        return True

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def happened(self, event: int) -> bool:
        """Whether an event has; ``TransportError`` for what went wrong on the device."""
        status = self._cuda.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        self._check(status, "cuEventQuery")
        return True

    def write_flag(self, stream: int, pointer: int, value: int) -> None:
        """Stores 32 bits once all before it on the stream is done and visible to everyone."""
        self._call("cuStreamWriteValue32_v2", stream, pointer, value, 0)

    def copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_many(
        self,
        stream: int,
        targets: npt.NDArray[np.uint64],
        sources: npt.NDArray[np.uint64],
        sizes: npt.NDArray[np.uint64],
    ) -> None:
        """Copies piece by piece with the copy engines, in any order."""
        if self._batch is not None:
            attributes = _CopyAttributes(order=_SOURCE_ORDER_STREAM)
            first, failed = c_size_t(0), c_size_t(0)
            arrays = (array.ctypes.data for array in (targets, sources, sizes))
            how = (byref(attributes), byref(first), 1, byref(failed))
            self._check(self._batch(*arrays, len(targets), *how, stream), _BATCH)
            return
        rows = zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True)
        for row in rows:
            self.copy(stream, *row)

    # -- kernels

    def load(self, text: str) -> int:
        """A module from PTX, compiled by the driver for the current device."""
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), text.encode())
        assert module.value is not None
        return module.value

    def unload(self, module: int) -> None:
        self._call("cuModuleUnload", module)

    def function(self, module: int, name: str) -> int:
        found = c_void_p()
        self._call("cuModuleGetFunction", byref(found), module, name.encode())
        assert found.value is not None
        return found.value

    def launch(self, stream: int, function: int, shape: tuple[int, int], *arguments: Any) -> None:
        """``shape``: blocks, and threads of each; ``arguments``: ctypes values."""
        pointers = (c_void_p * len(arguments))(
            *(ctypes.cast(ctypes.pointer(one), c_void_p) for one in arguments)
        )
        grid = (shape[0], 1, 1, shape[1], 1, 1, 0)
        self._call("cuLaunchKernel", function, *grid, stream, pointers, None)
