"""The rdma transport as far as it goes without a card: settings, reasons, memory of devices."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cloverinfer.config.load import load_config
from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import ConfigError, DeadlineError, TransportError
from cloverinfer.transport import create_endpoint, missing
from cloverinfer.transport._rdma_cuda import (
    DMA_BUF,
    PEERMEM,
    CudaSide,
    dma_buf_range,
    way_to_cards,
)
from cloverinfer.transport.base import DeviceMemory

without_device = pytest.mark.skipif(not missing("rdma"), reason="this host has a device")
needs_build = pytest.mark.skipif(
    importlib.util.find_spec("cloverinfer._verbs") is None, reason="built without libibverbs"
)


@without_device
def test_missing_says_what_to_do_and_an_endpoint_is_refused_with_it() -> None:
    reason = missing("rdma")
    assert "install" in reason or "no RDMA device" in reason or "active" in reason
    with pytest.raises(TransportError, match=r"RDMA device|rdma transport cannot be used"):
        create_endpoint("rdma", "a")


def test_missing_where_it_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "libibverbs-dev" in missing("rdma")
    with pytest.raises(TransportError, match="libibverbs-dev"):
        create_endpoint("rdma", "a")


@needs_build
@without_device
def test_device_that_is_not_there_is_named() -> None:
    with pytest.raises(TransportError, match=r"no RDMA device mlx5_7 .*this host has"):
        create_endpoint("rdma", "a", NetworkConfig(rdma_device="mlx5_7"))


# -- settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rdma_port", 0),
        ("rdma_port", 256),
        ("rdma_gid_index", -1),
        ("rdma_gid_type", "roce"),
        ("rdma_gid_address", "10.0.0.1/24"),
        ("rdma_gid_address", "FE80::1"),
        ("rdma_mtu", 1500),
        ("rdma_block_size", 4095),
        ("rdma_queue_pairs", 17),
        ("rdma_queue_depth", 1),
        ("rdma_signal_every", 129),
        ("rdma_timeout", 0),
        ("rdma_retries", 8),
        ("rdma_service_level", 16),
        ("rdma_spin_us", -1),
        ("rdma_device", ""),
    ],
)
def test_settings_outside_their_limits_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        NetworkConfig(**{field: value})  # type: ignore[arg-type]


def test_settings_come_from_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("cluster: {transport: rdma}\nnetwork: {rdma_device: mlx5_0, rdma_mtu: 2048}\n")
    config = load_config(file, environ={"CLOVER_NETWORK_RDMA_QUEUE_DEPTH": "64"}).cluster
    assert config.transport == "rdma"
    assert (config.network.rdma_device, config.network.rdma_mtu) == ("mlx5_0", 2048)
    assert config.network.rdma_queue_depth == 64


# -- memory of devices


def test_way_to_cards_is_peermem_only_where_its_module_is_loaded(tmp_path: Path) -> None:
    assert way_to_cards(tmp_path) == DMA_BUF
    modules = tmp_path / "proc/modules"
    modules.parent.mkdir()
    modules.write_text("nvidia 1 2 nvidia_peermem, Live 0x0\n")
    assert way_to_cards(tmp_path) == DMA_BUF
    modules.write_text("ib_core 1 2 - Live 0x0\nnvidia_peermem 1 0 - Live 0x0\n")
    assert way_to_cards(tmp_path) == PEERMEM


@pytest.mark.parametrize(
    ("pointer", "nbytes", "want"),
    [
        (8192, 4096, (8192, 4096, 0)),
        (8192 + 100, 4096, (8192, 8192, 100)),
        (8192 + 4095, 1, (8192, 4096, 4095)),
    ],
)
def test_dma_bufs_are_of_whole_pages(pointer: int, nbytes: int, want: tuple[int, int, int]) -> None:
    assert dma_buf_range(DeviceMemory(pointer, nbytes, 0)) == want


class FakeDriver:
    """Contexts that are counted, a file for a dma-buf, an event that happens at the third look."""

    def __init__(self) -> None:
        self.retained: list[int] = []
        self.inside = 0
        self.looks = 0
        self.exported: list[tuple[int, int]] = []
        self.fds: list[int] = []

    def retain(self, device: int) -> int:
        self.retained.append(device)
        return 100 + device

    def release(self, device: int) -> None:
        self.retained.remove(device)

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        assert context - 100 in self.retained
        self.inside += 1
        yield
        self.inside -= 1

    def dma_buf(self, pointer: int, nbytes: int) -> int:
        assert self.inside
        self.exported.append((pointer, nbytes))
        self.fds.append(os.open("/dev/null", os.O_RDONLY))
        return self.fds[-1]

    def happened(self, event: int) -> bool:
        assert self.inside
        self.looks += 1
        return event == 1 and self.looks >= 3


def test_exported_dma_buf_is_closed_once_it_was_registered() -> None:
    driver = FakeDriver()
    side = CudaSide(driver)  # type: ignore[arg-type]
    with side.exported(DeviceMemory(8192 + 16, 100, 3)) as (fd, offset):
        os.fstat(fd)
        assert offset == 16
    assert driver.exported == [(8192, 4096)]
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(driver.fds[0])
    assert driver.retained == [3]
    side.close()
    assert driver.retained == []


def test_event_is_waited_for_until_the_deadline() -> None:
    driver = FakeDriver()
    side = CudaSide(driver)  # type: ignore[arg-type]
    side.wait(1, time.monotonic() + 30)
    assert driver.looks == 3
    with pytest.raises(DeadlineError, match="event"):
        side.wait(2, time.monotonic() + 0.01)
    side.close()
