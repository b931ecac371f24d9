"""``cloverinfer verify`` as users run it: one host, a pair on the loopback, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tests.processes import start

PATIENCE = 60.0
VERIFY = [sys.executable, "-m", "cloverinfer.cli", "verify", "--quiet"]


class Running:
    """Commands that are ended with the test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *flags: str, secret: str = "open sesame") -> subprocess.Popen[str]:
        env = os.environ | {"CLOVER_NETWORK_SECRET": secret}
        pipe = subprocess.PIPE
        process = start([*VERIFY, *flags], env=env, stdout=pipe, stderr=pipe)
        self.processes.append(process)
        return process

    def listen(self, *flags: str) -> tuple[subprocess.Popen[str], str]:
        """A listening side and where it is."""
        process = self.start("--listen", *flags)
        assert process.stdout is not None
        for line in process.stdout:
            found = re.match(r"listening at (\S+)", line)
            if found:
                return process, found[1]
        raise AssertionError(f"it never listened: {process.communicate()[1]}")


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    for process in running.processes:
        process.kill()
        process.communicate()


def findings(process: subprocess.Popen[str]) -> tuple[int, str, list[dict[str, Any]]]:
    """Exit status, verdict and findings of a command with ``--json``."""
    out, err = process.communicate(timeout=PATIENCE)
    assert out, err
    answer = json.loads(out)
    return process.returncode, answer["verdict"], answer["findings"]


def figures(found: list[dict[str, Any]], transport: str) -> dict[str, float]:
    lines = [one for one in found if one["subject"] == transport]
    assert {one["verdict"] for one in lines} == {"ok"}
    return {name: value for one in lines for name, value in one["figures"].items()}


def test_host(running: Running) -> None:
    status, verdict, found = findings(running.start("--transport", "shm", "--json"))
    assert (status, verdict) == (0, "ok")
    assert {one["subject"] for one in found} >= {"shared memory", "rdma", "cuda", "NUMA", "shm"}
    seen = figures(found, "shm")
    assert 0 < seen["min_s"] <= seen["median_s"] <= seen["p99_s"] < 1
    assert seen["bytes_per_s"] > 0


def test_host_with_every_transport_in_lines(running: Running) -> None:
    process = running.start()
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    for transport in ("shm", "tcp"):
        assert len(re.findall(rf"^ok    {transport}: ", out, re.M)) == 4
    assert re.search(
        r"^ok    auto: takes shm between .*; not inproc: .*; not cuda_ipc: ", out, re.M
    )
    assert out.endswith("verdict: ok\n")
    assert err == ""


def test_pair(running: Running) -> None:
    listener, where = running.listen()
    status, verdict, found = findings(running.start("--peer", where, "--json"))
    assert (status, verdict) == (0, "ok")
    assert figures(found, "tcp")["bytes_per_s"] > 0
    (auto,) = [one["text"] for one in found if one["subject"] == "auto"]
    assert auto.startswith("takes shm between the two; not inproc: ")  # both are on this host
    assert {one["host"] for one in found if one["subject"] == "shared memory"} > {"127.0.0.1"}
    out, _ = listener.communicate(timeout=PATIENCE)
    assert listener.returncode == 0
    assert "is content" in out


def test_other_secret(running: Running) -> None:
    _, where = running.listen()
    out, _ = running.start("--peer", where, secret="guess").communicate(timeout=PATIENCE)
    assert running.processes[-1].returncode == 1
    assert "network.secret; set CLOVER_NETWORK_SECRET" in out
    assert "guess" not in out


def test_nobody_there(running: Running) -> None:
    _, where = running.listen()
    running.processes[0].kill()
    running.processes[0].wait()
    out, _ = running.start("--peer", where).communicate(timeout=PATIENCE)
    assert running.processes[-1].returncode == 1
    assert "verify --listen" in out


@pytest.mark.parametrize("dies", ["listener", "peer"])
def test_side_that_outlives_the_other_says_so(running: Running, dies: str) -> None:
    listener, where = running.listen()
    peer = running.start("--peer", where)
    assert peer.stdout is not None
    for line in peer.stdout:
        if line.startswith("ok    tcp: every byte"):
            break
    dying, other = (listener, peer) if dies == "listener" else (peer, listener)
    dying.kill()
    begun = time.monotonic()
    out, _ = other.communicate(timeout=PATIENCE)
    assert other.returncode == 1, out
    assert "fail  " in out
    assert time.monotonic() - begun < PATIENCE / 2  # noticed, not waited for


def test_listener_that_nobody_finds_gives_up(running: Running) -> None:
    listener, _ = running.listen("--wait", "0.2")
    out, _ = listener.communicate(timeout=PATIENCE)
    assert listener.returncode == 1
    assert "nobody came" in out


def test_interrupted_listener_ends_quietly(running: Running) -> None:
    listener, _ = running.listen()
    listener.send_signal(signal.SIGINT)
    _, err = listener.communicate(timeout=PATIENCE)
    assert listener.returncode == 130
    assert err == ""


def test_named_transport_that_is_missing_fails(running: Running) -> None:
    process = running.start("--transport", "ray", "--transport", "shm")
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert re.search(r"^fail  ray: .*ray start", out, re.M)
    assert re.search(r"^ok    shm: every byte", out, re.M)


@pytest.mark.ray
def test_ray_joins_a_running_cluster(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    context = ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    monkeypatch.setenv("RAY_ADDRESS", context.address_info["gcs_address"])
    try:
        status, verdict, found = findings(running.start("--transport", "ray", "--json"))
    finally:
        ray.shutdown()
    assert (status, verdict) == (0, "ok")
    assert figures(found, "ray")["bytes_per_s"] > 0
