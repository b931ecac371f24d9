"""What every transport that listens at a port must do: old incarnations and strangers."""

from __future__ import annotations

import contextlib
import random
import re
import socket
import time
from collections.abc import Callable

import numpy as np
import pytest
from tests.transport_kit import (
    PATIENCE,
    Make,
    Way,
    Wire,
    array,
    collect,
    put_error,
    rows,
    wire_params,
)
from tests.transport_partner import Start, answers

from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import TransportError
from cloverinfer.transport import Endpoint

NBYTES = 1 << 20


@pytest.fixture(params=wire_params(lambda wire: wire.has_port), scope="module")
def wire(request: pytest.FixtureRequest, ready: Callable[[Wire], Wire]) -> Wire:
    return ready(request.param)


def port_of(endpoint: Endpoint) -> tuple[str, int]:
    match = re.match(r"\w+://\[?([^/]+?)\]?:(\d+)(/|$)", endpoint.address())
    assert match
    return match[1], int(match[2])


def test_old_incarnation_is_refused_at_the_same_port(wire: Wire, make: Make) -> None:
    a, old = make("a"), make("old")
    way = Way(a, old, nbytes=4096)
    array(way.source)[:] = 7
    way.put(1)
    address, port = old.address(), port_of(old)[1]
    old.close()
    new = make("new", NetworkConfig(port=port))
    region = new.register(4096)
    assert port_of(new)[1] == port
    assert new.address() != address
    assert put_error(a, way.ranges, rows((0, 0)))
    with pytest.raises(TransportError):
        a.connect(address, timeout=5.0)
    assert not new.poll(0.1)
    assert not array(region).any()
    Way(a, new, nbytes=64).put(3)
    assert [notice for _, notice in collect(new, notices=1).notices] == [3]


def test_killed_process_restarted_at_the_same_port(wire: Wire, make: Make, start: Start) -> None:
    port = port_of(make("to find a free port"))[1] + 1
    first = start(NBYTES, port)
    answers(first)
    ranges = first.met.whole()
    first.kill()
    second = start(NBYTES, port)
    assert second.met.peer.address != first.met.peer.address
    assert put_error(first.met.endpoint, ranges, rows((0, 0)))
    answers(second)


@pytest.mark.parametrize("nbytes", [0, 1, 40, 5000, 3_000_000])
def test_strangers_garbage_is_dropped_and_counted(wire: Wire, make: Make, nbytes: int) -> None:
    a, b = make("a"), make("b")
    way = Way(a, b, nbytes=4096)
    array(way.source)[:] = 5
    way.put(0)
    collect(b, notices=1)
    dropped = b.dropped  # type: ignore[attr-defined]
    with socket.create_connection(port_of(b), timeout=PATIENCE) as stranger:
        with contextlib.suppress(OSError):  # where it hangs up before we have said all
            stranger.sendall(random.Random(nbytes).randbytes(nbytes))
            stranger.shutdown(socket.SHUT_WR)
    end = time.monotonic() + PATIENCE
    while b.dropped == dropped:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        assert not b.poll(0.01)
    way.expect(np.full(4096, 5, np.uint8))
    array(way.source)[:] = 6
    way.put(1)
    assert [notice for _, notice in collect(b, notices=1).notices] == [1]
    way.expect(np.full(4096, 6, np.uint8))
