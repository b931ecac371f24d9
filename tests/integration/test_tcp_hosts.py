"""Two hosts, made of network namespaces joined by a cable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from tests.network_hosts import Host, hosts
from tests.processes import start

from cloverinfer.transport._tcp_address import TcpAddress


@pytest.fixture
def pair() -> Iterator[list[Host]]:
    with hosts(2) as made:
        yield made


def on(host: Host, *words: str) -> subprocess.Popen[str]:
    command = host.command(sys.executable, "-m", "tests.tcp_host", *words)
    return start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.timeout(120)
def test_patterns_between_two_hosts_and_a_cable_that_is_cut(pair: list[Host]) -> None:
    first, second = pair
    listener = on(first, "listen", first.address)
    visitor = None
    try:
        address = line(listener)
        assert TcpAddress.parse(address).host == first.address
        visitor = on(second, "visit", second.address, address)
        assert line(visitor) == "whole"
        first.cut()
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
