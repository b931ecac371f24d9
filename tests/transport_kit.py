"""What tests of transports share: the transports, a way from one endpoint to another, and polling
until something came.

A transport joins every contract suite by its line in ``WIRES``.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import pytest

from cloverinfer.core.errors import TransportError
from cloverinfer.transport import Endpoint, Events, Ranges, Region, Slices, Ticket

RDMA_SPIN_US = int(os.environ.get("RDMA_SPIN_US", "0"))
"""``network.rdma_spin_us`` of the contract suites' endpoints: they run with and without."""
PATIENCE = 30.0
"""Seconds after which a test gives up; never what it expects."""
Make = Callable[..., Endpoint]
"""``make(name, network=None)``: an endpoint that the test need not close."""


@dataclass(frozen=True)
class Wire:
    """A transport as the suites take it."""

    name: str
    pace: int = 1
    """Counts of calls are divided by this."""
    most: int = 256 << 20
    """Bytes of the largest put in the ordinary suite."""
    processes: bool = True
    """Whether the suite between processes runs."""
    has_port: bool = False
    """Whether strangers can knock at the host and port in its addresses."""
    steady_memory: bool = True
    """Whether it keeps nothing of what was put, so that the process's memory tells of leaks."""
    loose_files: bool = False
    """Whether it opens files as it likes, so that they cannot be counted."""

    def count(self, calls: int) -> int:
        return max(calls // self.pace, 3)


WIRES = [
    Wire("inproc", processes=False),
    Wire("shm"),
    Wire("cuda_ipc"),
    Wire("tcp", has_port=True),
    Wire("null", processes=False, steady_memory=False),
    # It keeps three copies of what is put, and every put is an actor call.
    Wire("ray", pace=60, most=64 << 20, steady_memory=False, loose_files=True),
    # UCX opens sockets of its own.
    Wire("nixl", has_port=True, loose_files=True),
    # Where there is no card it runs in an emulated machine, at some tens of MB/s.
    Wire("rdma", pace=40, most=4 << 20, has_port=True),
]


def wire_params(wanted: Callable[[Wire], bool] = lambda wire: True) -> list[object]:
    """The wires as parameters of a fixture or test."""
    return [
        pytest.param(wire, id=wire.name, marks=[pytest.mark.ray] if wire.name == "ray" else [])
        for wire in WIRES
        if wanted(wire)
    ]


def segments() -> list[str]:
    return [
        name for name in os.listdir("/dev/shm") if name.startswith(f"cloverinfer-{os.getpid()}-")
    ]


def resident_bytes() -> int:
    """Memory of this process that is in use now."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


_kept: WeakKeyDictionary[Endpoint, Events] = WeakKeyDictionary()
"""What came while something else was waited for."""


def collect(endpoint: Endpoint, notices: int = 0, messages: int = 0) -> Events:
    """Polls until at least so many have come."""
    seen = _kept.pop(endpoint, Events())
    end = time.monotonic() + PATIENCE
    while len(seen.notices) < notices or len(seen.messages) < messages:
        assert time.monotonic() < end, f"{len(seen.notices)}, {len(seen.messages)} came"
        _add(seen, endpoint.poll(1.0))
    return seen


def remember(endpoint: Endpoint, events: Events) -> None:
    """Gives back what was not meant for the caller, for the next ``collect``."""
    kept = _kept.setdefault(endpoint, Events())
    kept.notices[:0] = events.notices
    kept.messages[:0] = events.messages


def finish(endpoint: Endpoint, *tickets: Ticket, timeout: float = PATIENCE) -> None:
    """Polls until the tickets are done; what else comes is kept for ``collect``."""
    waiting = {id(ticket) for ticket in tickets if not ticket.done}
    end = time.monotonic() + timeout
    while waiting:
        assert time.monotonic() < end, f"{len(waiting)} tickets are not done"
        events = endpoint.poll(1.0)
        assert all(ticket.done for ticket in events.tickets)
        waiting -= {id(ticket) for ticket in events.tickets}
        _add(_kept.setdefault(endpoint, Events()), events)


def settle(endpoint: Endpoint, *tickets: Ticket) -> None:
    """``finish`` where every put must have gone well."""
    finish(endpoint, *tickets)
    assert [ticket.error for ticket in tickets] == [None] * len(tickets)


def _add(seen: Events, events: Events) -> None:
    seen.notices += events.notices
    seen.messages += events.messages


def put_error(
    sender: Endpoint, ranges: Ranges, index: np.ndarray, timeout: float = 5.0
) -> TransportError | None:
    """The error of a put, at once or through its ticket; None where it went well."""
    try:
        ticket = sender.put(ranges, index, 999, timeout=timeout)
    except TransportError as error:
        return error
    finish(sender, ticket, timeout=timeout + PATIENCE)
    assert ticket.error is None or isinstance(ticket.error, TransportError)
    return ticket.error


def way_error(sender: Endpoint, peer: object, local: Slices, remote: Slices) -> str:
    """The error of ``prepare``, or of a put along what it made; empty where both went well."""
    try:
        ranges = sender.prepare(peer, local, remote)  # type: ignore[arg-type]
    except TransportError as error:
        return str(error)
    return str(put_error(sender, ranges, rows((0, 0))) or "")


def until_refused(call: Callable[[], object], timeout: float = PATIENCE) -> TransportError:
    """Calls until there is an error, which a peer that has gone must give soon."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        try:
            call()
        except TransportError as error:
            return error
        time.sleep(0.001)
    raise AssertionError("it never failed")


def array(region: Region) -> np.ndarray:
    return np.frombuffer(region.buffer, np.uint8)


def rows(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def offsets(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Way:
    """From one endpoint to another: connected, a region on both sides, whole-region slices."""

    def __init__(self, sender: Endpoint, receiver: Endpoint, nbytes: int, length: int = 0) -> None:
        self.sender, self.receiver = sender, receiver
        self.source, self.target = sender.register(nbytes), receiver.register(nbytes)
        self.peer = sender.connect(receiver.address())
        self.ranges = self.cut(np.arange(0, nbytes, length or nbytes), length or nbytes)

    def slices(self, at: np.ndarray, length: int) -> tuple[Slices, Slices]:
        at = at.astype(np.int64)
        return Slices(self.source, at, length), Slices(self.target.ref, at, length)

    def cut(self, at: np.ndarray, length: int) -> Ranges:
        return self.sender.prepare(self.peer, *self.slices(at, length))

    def start(self, notice: int, index: np.ndarray | None = None) -> Ticket:
        """A put of which nothing is known yet; ``settle`` is for later, and for one thread."""
        return self.sender.put(self.ranges, rows((0, 0)) if index is None else index, notice)

    def put(self, notice: int, index: np.ndarray | None = None) -> None:
        """A put that has gone well. Polls the sender, so that one thread may call it."""
        settle(self.sender, self.start(notice, index))

    def expect(self, want: np.ndarray) -> None:
        """The target holds ``want``, or zeroes with a transport that moves nothing."""
        if self.receiver.capabilities.moves_data:
            assert np.array_equal(array(self.target), want)
        else:
            assert not array(self.target).any()
