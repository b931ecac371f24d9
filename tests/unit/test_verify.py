"""What ``cloverinfer verify`` says of a host, by fake roots and drivers, and of a transport."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.cuda_kit import FakeDriver as FakeGpus

from cloverinfer.cli import main
from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import ConfigError, TransportError
from cloverinfer.transport import Endpoint, capabilities, create_endpoint, transport_names
from cloverinfer.transport.choice import choose, offer
from cloverinfer.transport.cuda_ipc import CudaIpcEndpoint
from cloverinfer.verify import far, host, measure, memory, run, sides
from cloverinfer.verify.cuda import DriverError, cuda_findings
from cloverinfer.verify.far import Far
from cloverinfer.verify.measure import check_transport
from cloverinfer.verify.messages import Ask, pattern, pieces
from cloverinfer.verify.near import Near
from cloverinfer.verify.report import Finding, good
from cloverinfer.verify.sides import Control

NETWORK = NetworkConfig()


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


PORT = "sys/class/infiniband/mlx5_0/ports/1/"
ACTIVE = {
    PORT + "state": "4: ACTIVE",
    PORT + "rate": "100 Gb/sec (4X EDR)",
    PORT + "link_layer": "Ethernet",
    PORT + "gids/0": "fe80:0000:0000:0000:0000:0000:0000:0001",
    PORT + "gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    PORT + "gids/2": "0000:0000:0000:0000:0000:0000:0000:0000",
    PORT + "gid_attrs/types/0": "IB/RoCE v1",
    PORT + "gid_attrs/types/1": "RoCE v2",
}


def test_rdma_port_that_works(tmp_path: Path) -> None:
    (found,) = host.rdma_devices(write(tmp_path, ACTIVE))
    assert (found.verdict, found.subject) == ("ok", "rdma mlx5_0/1")
    assert "link ACTIVE, 100 Gb/sec (4X EDR), 1 x IB/RoCE v1, 1 x RoCE v2" in found.text


@pytest.mark.parametrize(
    ("changed", "text", "fix"),
    [
        ({PORT + "state": "1: DOWN"}, "link DOWN", "cable"),
        ({PORT + "gids/0": "0000:0000", PORT + "gids/1": "0000:0000"}, "no GIDs", "address"),
    ],
)
def test_rdma_port_that_does_not(
    tmp_path: Path, changed: dict[str, str], text: str, fix: str
) -> None:
    (found,) = host.rdma_devices(write(tmp_path, ACTIVE | changed))
    assert found.verdict == "note"
    assert text in found.text
    assert fix in found.fix


def test_host_without_rdma(tmp_path: Path) -> None:
    (found,) = host.rdma_devices(tmp_path)
    assert (found.verdict, found.text) == ("note", "no RDMA devices")


def test_locked_memory_matters_where_rdma_is(tmp_path: Path) -> None:
    assert host.locked_memory(tmp_path, -1).verdict == "ok"
    assert host.locked_memory(tmp_path, 8 << 20).fix == ""
    found = host.locked_memory(write(tmp_path, ACTIVE), 8 << 20)
    assert "8 MiB" in found.text
    assert "ulimit" in found.fix


def test_shared_memory_that_is_missing_or_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host.shared_memory(tmp_path).verdict == "fail"
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert "GiB" in host.shared_memory(tmp_path).text
    monkeypatch.setattr(host, "LEAST_SHM", 1 << 60)
    assert "--shm-size" in host.shared_memory(tmp_path).fix


def test_numa_nodes(tmp_path: Path) -> None:
    node = "sys/devices/system/node/"
    assert host.numa_nodes(write(tmp_path, {node + "node0/cpulist": "0-3"})).verdict == "ok"
    found = host.numa_nodes(write(tmp_path, {node + "node1/cpulist": "4-7", node + "online": "0"}))
    assert found.text == "node0 has cores 0-3, node1 has cores 4-7"


def test_interfaces(tmp_path: Path) -> None:
    net = "sys/class/net/"
    up = {net + "eth0/operstate": "up", net + "eth0/mtu": "9000", net + "eth0/speed": "25000"}
    off = {net + "eth1/operstate": "down", net + "lo/operstate": "up"}
    (found,) = host.interfaces(write(tmp_path, up | off))
    assert (found.subject, found.text) == ("interface eth0", "MTU 9000, 25000 Mb/s")
    assert host.interfaces(tmp_path / "nothing")[0].verdict == "note"


def test_listening_address() -> None:
    assert "only this host" in host.listening(NETWORK).text
    assert host.listening(NetworkConfig(bind_host="0.0.0.0")).verdict == "ok"
    assert host.listening(NetworkConfig(bind_host="203.0.113.7")).verdict == "fail"


class FakeDriver:
    """Devices 0 and 1 do not reach device 2."""

    def __init__(self, devices: int, direct: bool = False) -> None:
        self.devices, self.direct = devices, direct

    def count(self) -> int:
        if self.devices < 0:
            raise DriverError("cuInit gives error 999")
        return self.devices

    def name(self, device: int) -> str:
        return f"Card {device}"

    def memory(self, device: int) -> int:
        return 80 << 30

    def can_access_peer(self, device: int, peer: int) -> bool:
        return 2 not in (device, peer)

    def dma_buf(self, device: int) -> bool:
        return self.direct


def test_cuda_devices_and_their_peers(tmp_path: Path) -> None:
    two = {found.subject: found for found in cuda_findings(tmp_path, FakeDriver(2, True))}
    assert two["cuda 1"].text == "Card 1, 80.0 GiB"
    assert two["cuda peers"].verdict == "ok"
    assert two["gpu direct rdma"].text == "dma-buf"
    three = {found.subject: found for found in cuda_findings(tmp_path, FakeDriver(3))}
    assert "0 to 2, 1 to 2, 2 to 0, 2 to 1" in three["cuda peers"].text
    assert "modprobe" in three["gpu direct rdma"].fix
    write(tmp_path, {"proc/modules": "nvidia_peermem 16384 0 - Live"})
    assert cuda_findings(tmp_path, FakeDriver(1))[-1].text == "nvidia-peermem"


def test_cuda_that_is_not_there(tmp_path: Path) -> None:
    (broken,) = cuda_findings(tmp_path, FakeDriver(-1))
    assert "error 999" in broken.text
    (none,) = cuda_findings(tmp_path, FakeDriver(0))
    assert none.verdict == "note"


def test_lines_and_verdicts() -> None:
    found = Finding("fail", "tcp", "no way", "dig one", "far")
    assert found.line() == "fail  tcp on far: no way; dig one"
    assert not good([found])
    assert good([Finding("note", "tcp", "none"), Finding("ok", "shm", "fine")])


def test_patterns_tell_places_and_seeds_apart() -> None:
    words = pattern(80_000, 1).view(np.uint64)
    assert len(set(words.tolist())) == 10_000
    assert (pattern(80_001, 1)[:80_000] != pattern(80_000, 2)).mean() > 0.5
    offsets, index = pieces(1003, 100)
    assert sorted(index[:, 0]) == list(range(10)) == sorted(offsets // 100)
    assert (np.diff(index[:, 0]) != 1).all()


# -- a transport, with the far side in a thread


@pytest.fixture
def near() -> Iterator[Near]:
    ours, theirs = create_endpoint("inproc", "near"), create_endpoint("inproc", "far")
    far = Far(Control(theirs, theirs.connect(ours.address())), NETWORK)
    thread = threading.Thread(target=far.serve)
    thread.start()
    near = Near(Control(ours, ours.connect(theirs.address())))
    yield near
    near.ask(Ask("end", good=True))
    thread.join()
    ours.close()
    theirs.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS", 0.01)
    monkeypatch.setattr(measure, "LARGE", 8 << 20)
    monkeypatch.setattr(measure, "_REGIONS", (8 << 20, 1 << 20))


def checked(near: Near, transport: str) -> list[Finding]:
    found: list[Finding] = []
    check_transport(near, transport, NETWORK, found.append, lambda line: None)
    return found


def test_transport_that_works(near: Near) -> None:
    moved, latency, small, large = checked(near, "inproc")
    assert {one.verdict for one in (moved, latency, small, large)} == {"ok"}
    assert 0 < latency.figures["min_s"] <= latency.figures["median_s"] <= latency.figures["p99_s"]
    assert large.figures["bytes"] == 8 << 20
    assert large.figures["bytes_per_s"] > 0


def test_bytes_that_do_not_arrive_are_a_failure(near: Near) -> None:
    found = checked(near, "null")
    assert found[0].verdict == "fail"
    assert "bytes came wrong" in found[0].text
    assert checked(near, "inproc")[0].verdict == "ok"


def test_transport_that_cannot_be_opened_is_a_failure_of_its_own(near: Near) -> None:
    (found,) = checked(near, "pigeon")
    assert found.verdict == "fail"
    assert "pigeon" in found.text
    assert checked(near, "inproc")[0].verdict == "ok"


def test_gpu_to_gpu_is_checked_where_both_sides_have_one(
    near: Near, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def make(endpoint: Endpoint, nbytes: int, device: int | None) -> memory.HostMemory:
        asked.append(device)
        return memory.HostMemory(endpoint, nbytes)

    able = dataclasses.replace(capabilities("inproc"), memory=("host", "cuda"))
    monkeypatch.setattr(measure, "capabilities", lambda name: able)
    monkeypatch.setattr(measure, "num_gpus", lambda: 1)
    monkeypatch.setattr(far, "num_gpus", lambda: 2)
    monkeypatch.setattr(sides, "make_memory", make)
    found = checked(near, "inproc")
    assert [one.subject for one in found[::4]] == ["inproc", "inproc from GPU 0 to GPU 1"]
    assert {one.verdict for one in found} == {"ok"}
    assert asked == [None, None, 1, 0]
    monkeypatch.setattr(far, "num_gpus", lambda: 0)
    assert len(checked(near, "inproc")) == 4


def test_memory_of_a_gpu_takes_patterns_and_counts_what_is_wrong() -> None:
    driver = FakeGpus()
    endpoint = CudaIpcEndpoint("one", driver=driver)
    gpu = memory.GpuMemory(endpoint, 1 << 16, 1, driver)
    sent = pattern(60_000, 3)
    gpu.write(sent)
    assert gpu.wrong(sent) == 0
    other = sent.copy()
    other[[5, 500]] ^= 1
    assert gpu.wrong(other) == 2
    endpoint.close()
    gpu.close()
    assert driver.retained == 0


def test_far_side_says_what_it_cannot(near: Near) -> None:
    with pytest.raises(TransportError, match="knows no 'dance'"):
        near.ask(Ask("dance"))
    with pytest.raises(TransportError, match="no transport is open"):
        near.ask(Ask("check"))


def test_what_auto_takes_is_said_with_what_it_passes_over(near: Near) -> None:
    theirs = near.ask(Ask("offer")).offer
    assert theirs is not None
    far_away = msgspec.structs.replace(theirs, host="another")
    found = run.automatic(choose(offer("here"), far_away), "the two")
    assert found.verdict == "ok"
    assert found.text.startswith("takes ")
    assert "not shm: here and " in found.text
    nothing = msgspec.structs.replace(far_away, missing=dict.fromkeys(transport_names(), "broken"))
    found = run.automatic(choose(offer("here"), nothing), "the two")
    assert found.verdict == "fail"
    assert "not tcp: " in found.text


# -- the command


@pytest.mark.parametrize("where", ["host", ":80", "host:", "host:70000", "a:b:1", ""])
def test_places_that_are_none_are_refused(where: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        run.split(where)


def test_places() -> None:
    assert run.split("[::1]:80") == ("::1", 80)
    assert run.split("node-3.cluster:0") == ("node-3.cluster", 0)


@pytest.mark.parametrize("flags", [["--transport", "null"], ["--peer", "a:1", "--listen"]])
def test_flags_that_make_no_sense_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["verify", *flags])
    assert ended.value.code == 2
