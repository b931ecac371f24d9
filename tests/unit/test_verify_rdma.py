"""What ``cloverinfer verify`` says of cards and GPUs, by fake roots and a fake driver."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloverinfer.core.errors import TransportError
from cloverinfer.verify.rdma import direct_paths, exported_memory
from cloverinfer.verify.report import Finding

ROOT_PORT = "pci0000:00/0000:00:01.0"


def place(root: Path, where: str, **files: str) -> Path:
    device = root / "sys/devices" / where
    device.mkdir(parents=True)
    for name, text in files.items():
        (device / name).write_text(text + "\n")
    bus = root / "sys/bus/pci/devices"
    bus.mkdir(parents=True, exist_ok=True)
    (bus / device.name).symlink_to(device)
    return device


def config(control: int | None) -> bytes:
    """Of a bridge whose second extended capability is ACS."""
    data = bytearray(4096)
    struct.pack_into("<I", data, 0x100, 0x148 << 20 | 0x0001)
    if control is not None:
        struct.pack_into("<I", data, 0x148, 0x000D)
        struct.pack_into("<H", data, 0x148 + 6, control)
    return bytes(data)


def host(root: Path, gpu: str, gpu_node: str = "0", control: int | None = 0) -> Path:
    """A card below a root port, and a GPU at ``gpu``."""
    card = place(root, f"{ROOT_PORT}/0000:01:00.0", vendor="0x15b3", numa_node="0")
    place(root, gpu, vendor="0x10de", **{"class": "0x030200"}, numa_node=gpu_node)
    (root / "sys/devices" / ROOT_PORT / "config").write_bytes(config(control))
    module = root / "sys/module/mlx5_core"
    module.mkdir(parents=True)
    (card / "driver").mkdir()
    (card / "driver/module").symlink_to(module)
    entry = root / "sys/class/infiniband/mlx5_0"
    entry.mkdir(parents=True)
    (entry / "device").symlink_to(card)
    return root


def found(root: Path) -> dict[str, Finding]:
    return {one.subject: one for one in direct_paths(root)}


def test_nothing_is_said_without_a_card(tmp_path: Path) -> None:
    assert direct_paths(tmp_path) == []


@pytest.mark.parametrize(
    ("gpu", "node", "verdict", "text"),
    [
        (f"{ROOT_PORT}/0000:02:00.0", "0", "ok", "one PCIe switch"),
        ("pci0000:00/0000:00:02.0/0000:03:00.0", "0", "ok", "one root complex"),
        ("pci0000:80/0000:80:01.0/0000:81:00.0", "1", "note", "NUMA nodes 0 and 1"),
    ],
)
def test_distance(tmp_path: Path, gpu: str, node: str, verdict: str, text: str) -> None:
    one = found(host(tmp_path, gpu, node))[f"path mlx5_0 to GPU {Path(gpu).name}"]
    assert one.verdict == verdict
    assert text in one.text


def test_driver_of_the_kernel_or_of_an_ofed(tmp_path: Path) -> None:
    root = host(tmp_path, f"{ROOT_PORT}/0000:02:00.0")
    assert found(root)["rdma driver mlx5_0"].text == "mlx5_core inbox, of the kernel"
    (root / "sys/module/mlx5_core/version").write_text("24.10\n")
    assert "24.10" in found(root)["rdma driver mlx5_0"].text


@pytest.mark.parametrize(
    ("control", "verdict", "text"),
    [(0, "ok", "nothing"), (0x04, "note", "0000:00:01.0"), (None, "ok", "nothing")],
)
def test_acs(tmp_path: Path, control: int | None, verdict: str, text: str) -> None:
    one = found(host(tmp_path, f"{ROOT_PORT}/0000:02:00.0", control=control))["ACS"]
    assert one.verdict == verdict
    assert text in one.text


def test_acs_that_may_not_be_read(tmp_path: Path) -> None:
    root = host(tmp_path, f"{ROOT_PORT}/0000:02:00.0")
    (root / "sys/devices" / ROOT_PORT / "config").write_bytes(bytes(64))
    assert found(root)["ACS"].fix == "run as root"


def test_iommu(tmp_path: Path) -> None:
    root = host(tmp_path, f"{ROOT_PORT}/0000:02:00.0")
    assert found(root)["IOMMU"].text == "off"
    (root / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert "iommu=pt" in found(root)["IOMMU"].fix
    (root / "proc").mkdir()
    (root / "proc/cmdline").write_text("quiet iommu=pt\n")
    assert found(root)["IOMMU"].verdict == "ok"


class FakeDriver:
    """Device 0, whose memory can be exported, or not."""

    def __init__(self, able: bool) -> None:
        self.able, self.held = able, 0

    def device_count(self) -> int:
        return 1

    def retain(self, device: int) -> int:
        self.held += 1
        return 7

    def release(self, device: int) -> None:
        self.held -= 1

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        yield

    def make_memory(self, nbytes: int) -> int:
        self.held += 1
        return 1 << 21

    def free_memory(self, pointer: int) -> None:
        self.held -= 1

    def dma_buf(self, pointer: int, nbytes: int) -> int:
        if not self.able:
            raise TransportError("operation not supported (801)")
        return os.open("/dev/null", os.O_RDONLY)


@pytest.mark.parametrize(("able", "verdict"), [(True, "ok"), (False, "note")])
def test_exported_memory_is_tried_and_given_back(able: bool, verdict: str) -> None:
    driver = FakeDriver(able)
    (one,) = exported_memory(driver)  # type: ignore[arg-type]
    assert one.verdict == verdict
    assert able or "801" in one.text
    assert driver.held == 0
