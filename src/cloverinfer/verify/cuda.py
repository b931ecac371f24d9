"""What the CUDA driver says of this host's devices, asked through libcuda itself: no toolkit."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Protocol

from .report import NOTE, OK, Finding, gib

_DMA_BUF = 124
"""CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED."""
_NO_DEVICE = 100


class Driver(Protocol):
    """What is asked of a driver; a fake one in tests."""

    def count(self) -> int: ...
    def name(self, device: int) -> str: ...
    def memory(self, device: int) -> int: ...
    def can_access_peer(self, device: int, peer: int) -> bool: ...
    def dma_buf(self, device: int) -> bool: ...


class DriverError(Exception):
    """The driver refused; the text says which call, and why."""


class LibCuda:
    """``libcuda.so.1``: ``OSError`` where there is none, ``DriverError`` where it fails."""

    def __init__(self) -> None:
        self._lib = ctypes.CDLL("libcuda.so.1")
        self._call("cuInit", ctypes.c_uint(0))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status == _NO_DEVICE:
            raise DriverError("it finds no device")
        if status != 0:
            raise DriverError(f"{name} gives error {status}")

    def count(self) -> int:
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def name(self, device: int) -> str:
        text = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", text, ctypes.c_int(256), ctypes.c_int(device))
        return text.value.decode(errors="replace")

    def memory(self, device: int) -> int:
        nbytes = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), ctypes.c_int(device))
        return nbytes.value

    def can_access_peer(self, device: int, peer: int) -> bool:
        able = ctypes.c_int()
        arguments = (ctypes.byref(able), ctypes.c_int(device), ctypes.c_int(peer))
        self._call("cuDeviceCanAccessPeer", *arguments)
        return bool(able.value)

    def dma_buf(self, device: int) -> bool:
        able = ctypes.c_int()
        arguments = (ctypes.byref(able), ctypes.c_int(_DMA_BUF), ctypes.c_int(device))
        self._call("cuDeviceGetAttribute", *arguments)
        return bool(able.value)


def cuda_findings(root: Path, driver: Driver | None = None) -> list[Finding]:
    """Devices, who reaches whose memory, and whether network cards can."""
    try:
        driver = driver or LibCuda()
        count = driver.count()
        found = [_device(driver, device) for device in range(count)]
        if count > 1:
            found.append(_peers(driver, count))
        if count:
            found.append(_direct(root, all(driver.dma_buf(device) for device in range(count))))
    except OSError:
        return [Finding(NOTE, "cuda", "no NVIDIA driver (libcuda.so.1)")]
    except DriverError as error:
        fix = "see nvidia-smi; in a container start it with the devices (docker: --gpus all)"
        return [Finding(NOTE, "cuda", f"the driver is there, but {error}", fix)]
    return found or [Finding(NOTE, "cuda", "the driver is there, but no device")]


def _device(driver: Driver, device: int) -> Finding:
    return Finding(OK, f"cuda {device}", f"{driver.name(device)}, {gib(driver.memory(device))}")


def _peers(driver: Driver, count: int) -> Finding:
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [f"{a} to {b}" for a, b in pairs if not driver.can_access_peer(a, b)]
    if not apart:
        return Finding(OK, "cuda peers", "every device reaches every other's memory")
    fix = "copies between them go through host memory; see nvidia-smi topo -p2p r"
    return Finding(NOTE, "cuda peers", f"no access from {', '.join(apart)}", fix)


def _direct(root: Path, dma_buf: bool) -> Finding:
    try:
        peermem = "nvidia_peermem " in (root / "proc/modules").read_text()
    except OSError:
        peermem = False
    ways = [name for name, there in (("nvidia-peermem", peermem), ("dma-buf", dma_buf)) if there]
    if ways:
        return Finding(OK, "gpu direct rdma", " and ".join(ways))
    text = "neither nvidia-peermem nor dma-buf: network cards cannot reach GPU memory"
    return Finding(NOTE, "gpu direct rdma", text, "modprobe nvidia-peermem")
