"""Two hosts, made of network namespaces joined by a cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.processes import start

from cloverinfer.transport._tcp_address import TcpAddress

HERE = f"clv{os.getpid() % 100_000}"
HOSTS = {f"{HERE}a": "198.18.0.1", f"{HERE}b": "198.18.0.2"}
"""Of the range that is set apart for tests between networks."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need root and the command ip")
    with contextlib.ExitStack() as undo:
        try:
            for name in HOSTS:
                ip("netns", "add", name)
                undo.callback(ip, "netns", "del", name)
            a, b = HOSTS
            ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
            for name, address in HOSTS.items():
                ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", name, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as problem:
            pytest.skip(f"no network namespaces here: {problem.stderr.strip()}")
        yield list(HOSTS)


def on(host: str, *words: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "tests.tcp_host", *words]
    return start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(120)
def test_patterns_between_two_hosts_and_a_cable_that_is_cut(hosts: list[str]) -> None:
    first, second = hosts
    listener = on(first, "listen", HOSTS[first])
    visitor = None
    try:
        address = line(listener)
        assert TcpAddress.parse(address).host == HOSTS[first]
        visitor = on(second, "visit", HOSTS[second], address)
        assert line(visitor) == "whole"
        ip("-n", first, "link", "set", first, "down")
        # Nothing says that the other host is gone: only the deadline tells.
        assert visitor.stdin is not None
        visitor.stdin.write("\n")
        visitor.stdin.flush()
        assert line(visitor) == "DeadlineError"
        assert visitor.wait(30) == 0
    finally:
        for process in (listener, visitor):
            if process is not None:
                process.kill()
                process.communicate()
