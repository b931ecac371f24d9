"""Hosts made of network namespaces joined by a switch, for tests between hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Host:
    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """What runs ``words`` there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def end_processes(self) -> None:
        """Kills all that runs there, and waits for its end."""
        deadline = time.monotonic() + 30.0
        while pids := self.pids():
            assert time.monotonic() < deadline, f"{pids} do not end"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def pids(self) -> list[int]:
        listing = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, timeout=30
        )
        return [int(word) for word in listing.stdout.split()]

    def cut(self) -> None:
        """Takes the host's cable out."""
        ip("-n", self.namespace, "link", "set", "eth0", "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Skips the test where the machine makes no namespaces. Addresses are of the range that is set
    apart for tests between networks."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    mark = f"clv{os.getpid() % 100_000}"
    made = [Host(f"{mark}h{i}", f"198.18.0.{i + 1}") for i in range(count)]
    with contextlib.ExitStack() as undo:
        try:
            _switch(f"{mark}s", undo)
            for host in made:
                _plug_in(host, f"{mark}s", undo)
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"no network namespaces here: {problem.stderr.strip()}")
        yield made


def _switch(namespace: str, undo: contextlib.ExitStack) -> None:
    ip("netns", "add", namespace)
    undo.callback(ip, "netns", "del", namespace)
    ip("-n", namespace, "link", "add", "switch", "type", "bridge")
    ip("-n", namespace, "link", "set", "switch", "up")


def _plug_in(host: Host, switch: str, undo: contextlib.ExitStack) -> None:
    name, port = host.namespace, f"p{host.address.rpartition('.')[2]}"
    ip("netns", "add", name)
    undo.callback(ip, "netns", "del", name)
    ip("-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", name, "addr", "add", f"{host.address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    ip("-n", switch, "link", "set", port, "master", "switch", "up")
