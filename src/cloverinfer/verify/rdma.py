"""How network cards and GPUs of this host lie to each other: driver, PCIe, ACS, IOMMU, dma-bufs.

Read from /sys and /proc; ``root`` stands for ``/`` in tests. Ports and GIDs are ``host``'s, what
CUDA says of devices is ``cuda``'s.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from ..core.errors import TransportError
from ..transport._cuda_driver import Driver, load_library
from ..transport._rdma_cuda import CudaSide
from ..transport.base import DeviceMemory
from .report import NOTE, OK, Finding

_NVIDIA, _DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""A vendor's id, and the first digits of its GPUs' class codes."""
_EXTENDED, _ACS = 0x100, 0x000D
_REDIRECT = 0x0C
"""ACS control: request and completion redirect."""
_EXPORTED = 2 << 20


def direct_paths(root: Path) -> list[Finding]:
    """Nothing where there is no card."""
    cards = _cards(root)
    if not cards:
        return []
    gpus = _gpus(root)
    found = [_driver(root, name, path) for name, path in cards.items()]
    found += [_distance(name, path, gpu) for name, path in cards.items() for gpu in gpus]
    if gpus:
        found += [_iommu(root), _acs(root, [*cards.values(), *gpus])]
    return found


def exported_memory(driver: Driver | None = None) -> list[Finding]:
    """Whether a dma-buf of GPU memory can be had, tried; nothing where there is no driver."""
    if driver is None and load_library() is None:
        return []
    fix = "modprobe nvidia-peermem, or a driver with open kernel modules (515 or newer)"
    try:
        driver = driver or Driver()
        if driver.device_count() == 0:
            return []
        side = CudaSide(driver)
        try:
            with driver.current(side.context(0)):
                pointer = driver.make_memory(_EXPORTED)
                try:
                    with side.exported(DeviceMemory(pointer, _EXPORTED, 0)) as (fd, _):
                        text = f"{_EXPORTED >> 20} MiB of device 0 exported as descriptor {fd}"
                finally:
                    driver.free_memory(pointer)
        finally:
            side.close()
    except TransportError as error:
        return [Finding(NOTE, "dma-buf", f"GPU memory cannot be exported: {error}", fix)]
    return [Finding(OK, "dma-buf", text)]


def _cards(root: Path) -> dict[str, Path]:
    """Where each card is in the tree of devices; soft ones are nowhere."""
    folder = root / "sys/class/infiniband"
    names = sorted(folder.iterdir()) if folder.is_dir() else []
    return {one.name: (one / "device").resolve() for one in names if (one / "device").exists()}


def _gpus(root: Path) -> list[Path]:
    folder = root / "sys/bus/pci/devices"
    devices = sorted(folder.iterdir()) if folder.is_dir() else []
    return [
        one.resolve()
        for one in devices
        if _read(one / "vendor") == _NVIDIA and _read(one / "class").startswith(_DISPLAYS)
    ]


def _driver(root: Path, name: str, path: Path) -> Finding:
    module = (path / "driver/module").resolve().name
    version = _read(root / "sys/module" / module / "version")
    origin = f"{version} (an OFED's)" if version else "inbox, of the kernel"
    return Finding(OK, f"rdma driver {name}", f"{module} {origin}")


def _distance(name: str, card: Path, gpu: Path) -> Finding:
    """By what the two have in common of the tree: bridges are PCI addresses below a root."""
    subject = f"path {name} to GPU {gpu.name}"
    common = os.path.commonpath([card, gpu])
    steps = [part for part in Path(common).parts if part.count(":") == 2 or part[:3] == "pci"]
    if len(steps) > 1:
        return Finding(OK, subject, "behind one PCIe switch or port")
    numa = _read(card / "numa_node"), _read(gpu / "numa_node")
    if steps or numa[0] == numa[1]:
        return Finding(OK, subject, "through one root complex, or one NUMA node")
    fix = "take a card of the GPU's own node (network.rdma_device)"
    return Finding(NOTE, subject, f"NUMA nodes {numa[0]} and {numa[1]}", fix)


def _iommu(root: Path) -> Finding:
    folder = root / "sys/class/iommu"
    if not folder.is_dir() or not any(folder.iterdir()):
        return Finding(OK, "IOMMU", "off")
    if "iommu=pt" in _read(root / "proc/cmdline").split():
        return Finding(OK, "IOMMU", "on, passing through")
    fix = "cards reach GPUs slowly or not at all through it: boot with iommu=pt, or without"
    return Finding(NOTE, "IOMMU", "on, translating", fix)


def _acs(root: Path, ends: list[Path]) -> Finding:
    """Whether a bridge above a card or a GPU sends what goes between them up to the root."""
    bridges = {up for end in ends for up in end.parents if (up / "config").exists()}
    states = {bridge.name: _redirects((bridge / "config").read_bytes()) for bridge in bridges}
    on = sorted(name for name, state in states.items() if state)
    if on:
        fix = "turn it off for them: setpci -s BRIDGE ECAP_ACS+0x6.w=0000, or in the firmware"
        return Finding(NOTE, "ACS", f"redirects at {', '.join(on)}", fix)
    if any(state is None for state in states.values()):
        return Finding(NOTE, "ACS", "cannot be read", "run as root")
    return Finding(OK, "ACS", "redirects nothing")


def _redirects(config: bytes) -> bool | None:
    """From a device's configuration space; None where only its beginning may be read."""
    if len(config) <= _EXTENDED:
        return None
    at, seen = _EXTENDED, set()
    while _EXTENDED <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        (head,) = struct.unpack_from("<I", config, at)
        if head & 0xFFFF == _ACS:
            return bool(struct.unpack_from("<H", config, at + 6)[0] & _REDIRECT)
        at = head >> 20
    return False


def _read(file: Path) -> str:
    """Stripped; empty where the kernel does not tell."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
