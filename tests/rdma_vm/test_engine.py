"""What only the rdma transport can do wrong. Needs two devices that reach each other, ``rx0`` and
``rx1`` of the guest (see run_in_vm.sh), or those that ``RDMA_DEVICES`` names.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.transport_kit import (
    PATIENCE,
    Way,
    array,
    collect,
    offsets,
    put_error,
    rows,
    settle,
    until_refused,
)

from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import Ticket, missing
from cloverinfer.transport.rdma import RdmaEndpoint

pytestmark = pytest.mark.skipif(bool(missing("rdma")), reason=missing("rdma"))
_verbs = pytest.importorskip("cloverinfer._verbs", exc_type=ImportError)
DEVICES = os.environ.get("RDMA_DEVICES", "rx0,rx1").split(",")
in_guest = pytest.mark.skipif(DEVICES != ["rx0", "rx1"], reason="it takes the guest's links down")
MakePair = Callable[..., tuple[RdmaEndpoint, RdmaEndpoint]]


@pytest.fixture
def pair() -> Iterator[MakePair]:
    """Two endpoints, each on its own device, so that packets cross the wire."""
    made: list[RdmaEndpoint] = []

    def make(**fields: object) -> tuple[RdmaEndpoint, RdmaEndpoint]:
        for name, device in zip("ab", DEVICES, strict=True):
            # Emulation may stand still for longer than a card ever does.
            network = NetworkConfig(**{"rdma_device": device, "rdma_timeout": 16, **fields})
            made.append(RdmaEndpoint(name, network))
        return made[-2], made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


def fill(way: Way, seed: int = 1) -> np.ndarray:
    source = array(way.source)
    source[:] = np.random.default_rng(seed).integers(0, 256, len(source), np.uint8)
    return source


# -- what is written


@pytest.mark.parametrize(
    "fields",
    [
        {"rdma_queue_depth": 2, "rdma_signal_every": 1},
        {"rdma_queue_depth": 8, "rdma_signal_every": 8},
        {"rdma_queue_depth": 64, "rdma_signal_every": 16, "rdma_block_size": 4096},
        {"rdma_queue_depth": 4, "rdma_signal_every": 4, "rdma_spin_us": 50_000},
    ],
    ids=["two", "eight", "small-blocks", "spinning"],
)
def test_scattered_blocks_of_one_put_wait_for_room(pair: MakePair, fields: dict[str, int]) -> None:
    count, length = 1000, 1000
    a, b = pair(**fields)
    way = Way(a, b, nbytes=count * length, length=length)
    source = fill(way).reshape(count, length)
    order = np.random.default_rng(2).permutation(count).astype(np.int32)
    index = np.stack([np.arange(count, dtype=np.int32), order], 1)
    settle(a, way.start(7, index))
    assert [notice for _, notice in collect(b, notices=1).notices] == [7]
    want = np.zeros_like(source)
    want[order] = source
    way.expect(want.reshape(-1))


@pytest.mark.parametrize("pairs", [1, 4, 16])
def test_large_puts_over_several_queue_pairs_keep_their_order(pair: MakePair, pairs: int) -> None:
    """Each overwrites all of the one before, or some of it, and none waits for another."""
    nbytes, length = 6 << 20, 1 << 18
    a, b = pair(rdma_queue_pairs=pairs, rdma_queue_depth=4, rdma_signal_every=2)
    way = Way(a, b, nbytes=nbytes, length=length)
    source = fill(way).reshape(-1, length)
    count = len(source)
    want = np.zeros_like(source)
    tickets = []
    for notice in range(4):
        rolled = np.roll(np.arange(count, dtype=np.int32), notice)
        every = np.stack([rolled, np.arange(count, dtype=np.int32)], 1)
        one = rows((notice, count - 1 - notice))
        tickets += [way.start(2 * notice, every), way.start(2 * notice + 1, one)]
        want[:] = source[rolled]
        want[count - 1 - notice] = source[notice]
    settle(a, *tickets)
    assert [notice for _, notice in collect(b, notices=8).notices] == list(range(8))
    way.expect(want.reshape(-1))


def test_puts_with_a_spinning_poll(pair: MakePair) -> None:
    a, b = pair(rdma_spin_us=20_000)
    way = Way(a, b, nbytes=4096)
    for notice in range(20):
        fill(way, notice)
        way.put(notice)
        assert [n for _, n in collect(b, notices=1).notices] == [notice]
    way.expect(array(way.source))
    assert not a.poll(0.01)
    assert not a.poll(0)
    way.put(20)
    until(lambda: [n for _, n in b.poll(0).notices] == [20])


def test_what_comes_after_the_spinning_wakes_who_sleeps(pair: MakePair) -> None:
    a, b = pair(rdma_spin_us=500)
    way = Way(a, b, nbytes=4096)
    for notice in range(12):  # before, at about, and after the end of spinning and of what follows
        sender = threading.Timer(notice * 1e-3, a.put, (way.ranges, rows((0, 0)), notice))
        sender.start()
        assert [n for _, n in collect(b, notices=1).notices] == [notice]
        sender.join(PATIENCE)
        assert a.poll(PATIENCE).tickets


def test_puts_without_room_go_out_though_nobody_polls_after_spinning(pair: MakePair) -> None:
    a, b = pair(rdma_spin_us=1_000_000, rdma_queue_depth=2, rdma_signal_every=2)
    way = Way(a, b, nbytes=1 << 16, length=1 << 10)
    every = np.repeat(np.arange(64, dtype=np.int32)[:, None], 2, axis=1)
    fill(way)
    way.put(1)
    for notice in range(2, 6):
        way.start(notice, every)
    a.send(way.peer, bytes(300_000))
    assert [n for _, n in collect(b, notices=5, messages=1).notices] == [1, 2, 3, 4, 5]
    way.expect(array(way.source))


def test_threads_put_while_another_spins(pair: MakePair) -> None:
    count, each = 4, 25
    a, b = pair(rdma_spin_us=1_000_000, rdma_queue_depth=4, rdma_signal_every=2)
    way = Way(a, b, nbytes=1 << 16, length=1 << 12)
    source = fill(way)
    finished: list[Ticket] = []

    def spin() -> None:
        end = time.monotonic() + PATIENCE
        while len(finished) < count * each and time.monotonic() < end:
            finished.extend(a.poll(0.05).tickets)

    def put(thread: int) -> None:
        for i in range(each):
            a.put(way.ranges, rows((i % 16, i % 16)), thread * each + i)

    threads = [threading.Thread(target=spin)]
    threads += [threading.Thread(target=put, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    notices = [n for _, n in collect(b, notices=count * each).notices]
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert sorted(notices) == list(range(count * each))
    for i in range(count):  # a thread's own stay in order
        assert [n for n in notices if n // each == i] == list(range(i * each, (i + 1) * each))
    assert [ticket.error for ticket in finished] == [None] * count * each
    way.expect(source)


# -- devices and GIDs


def test_unknown_device_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(TransportError, match=f"no RDMA device mlx9_9.*{DEVICES[0]} port 1: active"):
        RdmaEndpoint("a", NetworkConfig(rdma_device="mlx9_9"))
    with pytest.raises(TransportError, match="port 9"):
        RdmaEndpoint("a", NetworkConfig(rdma_device=DEVICES[0], rdma_port=9))


@in_guest
@pytest.mark.parametrize(
    "fields",
    [{"rdma_gid_index": 1}, {"rdma_gid_type": "roce_v2"}, {"rdma_gid_address": "10.98.0.1"}],
    ids=["index", "type", "address"],
)
def test_gid_by_index_type_and_address(fields: dict[str, object]) -> None:
    endpoint = RdmaEndpoint("a", NetworkConfig(rdma_device="rx0", **fields))
    assert endpoint._engine.gid_index == 1
    endpoint.close()


@in_guest
def test_gid_that_is_not_there_is_refused_with_those_that_are() -> None:
    for fields in ({"rdma_gid_address": "10.98.0.77"}, {"rdma_gid_type": "ib"}):
        with pytest.raises(TransportError, match=r"no GID of rx0.*1 roce_v2 10\.98\.0\.1"):
            RdmaEndpoint("a", NetworkConfig(rdma_device="rx0", **fields))


@in_guest
def test_mtu_of_the_smaller_side_and_not_above_the_port_s(pair: MakePair) -> None:
    a, b = pair(rdma_mtu=1024)
    way = Way(a, b, nbytes=10_000)
    fill(way)
    way.put(1)
    collect(b, notices=1)
    way.expect(array(way.source))
    assert a._engine.mtu == 1024
    run("ip", "link", "set", "v0", "mtu", "1500")
    try:
        with pytest.raises(TransportError, match=r"rdma_mtu 4096 is more than rx0 carries"):
            RdmaEndpoint("c", NetworkConfig(rdma_device="rx0", rdma_mtu=4096))
    finally:
        run("ip", "link", "set", "v0", "mtu", "4500")


# -- memory that cannot be registered


LIMITED = """
import resource, sys
from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import TransportError
from cloverinfer.transport.rdma import RdmaEndpoint

resource.setrlimit(resource.RLIMIT_MEMLOCK, (4 << 20, 4 << 20))
endpoint = RdmaEndpoint("a", NetworkConfig(rdma_device=sys.argv[1]))
try:
    endpoint.register(8 << 20)
except TransportError as error:
    print(error)
endpoint.close()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="setpriv needs root")
def test_limit_on_locked_memory_is_named_with_its_cure() -> None:
    # Root locks what it likes, unless it lacks this capability.
    command = ["setpriv", "--bounding-set=-ipc_lock", sys.executable, "-c", LIMITED, DEVICES[0]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "may lock 4 MiB in all" in done.stdout
    assert "ulimit -l unlimited" in done.stdout


@in_guest
def test_paging_on_demand_is_refused_where_the_device_does_not() -> None:
    endpoint = RdmaEndpoint("a", NetworkConfig(rdma_device="rx0", rdma_on_demand_paging=True))
    with pytest.raises(TransportError, match=r"rx0 does not page on demand.*rdma_on_demand_paging"):
        endpoint.register(4096)
    endpoint.close()


# -- regions that go, and failures


@pytest.mark.parametrize("spin_us", [0, 20_000])
def test_closing_a_region_spares_other_puts_of_its_link(pair: MakePair, spin_us: int) -> None:
    a, b = pair(rdma_spin_us=spin_us)
    kept, closed = Way(a, b, nbytes=1 << 20), Way(a, b, nbytes=1 << 20)
    fill(kept)
    link = kept.peer.link  # type: ignore[attr-defined]
    tickets = [kept.start(1), closed.start(2), kept.start(3)]
    closed.target.close()
    settle(a, *tickets)
    assert "closed" in str(put_error(a, closed.ranges, rows((0, 0))))
    kept.put(4)
    assert [notice for _, notice in collect(b, notices=4).notices] == [1, 2, 3, 4]
    kept.expect(array(kept.source))
    assert kept.peer.link == link  # type: ignore[attr-defined]


def test_fenced_peer_is_told_once_and_then_connects_by_itself(pair: MakePair) -> None:
    a, b = pair()
    way = Way(a, b, nbytes=4096)
    way.put(1)
    b.fence(a.address())
    assert "control connection ended" in str(until_refused(lambda: check(way)))
    fill(way)
    way.put(3)
    assert [notice for _, notice in collect(b, notices=2).notices][-1] == 3
    way.expect(array(way.source))


def check(way: Way) -> None:
    """A put whose error is raised."""
    error = put_error(way.sender, way.ranges, rows((0, 0)))
    if error is not None:
        raise error


HEAD = struct.Struct("<4sII")
FOUND, FOUND_KIND = struct.Struct("<QQII"), 5


def forward(source: socket.socket, target: socket.socket) -> None:
    """Control frames, with keys of regions replaced by one that no region has."""
    with contextlib.suppress(OSError):
        while head := source.recv(HEAD.size, socket.MSG_WAITALL):
            _, kind, nbytes = HEAD.unpack(head)
            payload = source.recv(nbytes, socket.MSG_WAITALL)
            if kind == FOUND_KIND:
                number, address, _, there = FOUND.unpack(payload)
                payload = FOUND.pack(number, address, 0xBAD0BAD, there)
            target.sendall(head + payload)
    target.close()


def test_write_with_a_wrong_key_fails_with_the_card_s_reason(pair: MakePair) -> None:
    a, b = pair()
    source, target = a.register(4096), b.register(4096)
    (ours, left), (right, theirs) = socket.socketpair(), socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    ways = [threading.Thread(target=forward, args=way) for way in ((left, right), (right, left))]
    for thread in ways:
        thread.start()
    assert b._engine.add_incoming(theirs.detach())
    link = a._engine.add_outgoing(ours.detach(), PATIENCE)
    at = offsets(0)
    pointer = array(source).ctypes.data
    ranges = _verbs.VerbsRanges((pointer, 4096), 1, at, (1, 4096), at, 4096)
    assert [region.ref.name for region in (source, target)] == ["g1", "g1"]
    a._engine.put(link, 1, ranges, rows((0, 0)), 5, PATIENCE)
    ((number, late, problem),) = a._engine.poll(PATIENCE)[1]
    assert (number, late) == (1, False)
    assert "REM_ACCESS_ERR" in problem
    assert a._engine.problem(link) == problem
    assert not array(target).any()
    a._engine.drop_outgoing(link)
    for thread in ways:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@in_guest
def test_lost_packets_are_sent_again(pair: MakePair) -> None:
    # Of a write of 256 packets soft RoCE has every 64th acknowledged. All that it sends again
    # between two of these counts as tries, though there was progress, and of 64 packets often more
    # than 6 are lost; a card counts anew. With 7 it does not count.
    a, b = pair(rdma_retries=7)
    way = Way(a, b, nbytes=1 << 20, length=1 << 16)
    every = np.repeat(np.arange(16, dtype=np.int32)[:, None], 2, axis=1)
    before = sent_again("rx0")
    with netem("v0", "loss", "3%"), netem("v1", "loss", "3%"):
        for notice in range(2):
            fill(way, notice)
            way.put(notice, every)
            a.send(way.peer, bytes(100_000))
            seen = collect(b, notices=1, messages=1)
            assert [n for _, n in seen.notices] == [notice]
            way.expect(array(way.source))
    assert sent_again("rx0") > before


def sent_again(device: str) -> int:
    """How often soft RoCE has gone back in what it had sent."""
    counters = Path("/sys/class/infiniband", device, "ports/1/hw_counters")
    return int((counters / "completer_retry_err").read_text())


@in_guest
@pytest.mark.parametrize(
    ("side", "reason"), [("v1", "RETRY_EXC_ERR"), ("v0", "LOC_QP_OP_ERR|RETRY_EXC_ERR")]
)
def test_downed_link_fails_puts_with_its_reason_and_they_go_on_when_it_is_up(
    pair: MakePair, caplog: pytest.LogCaptureFixture, side: str, reason: str
) -> None:
    a, b = pair(rdma_retries=2, rdma_timeout=14)
    way = Way(a, b, nbytes=1 << 16)
    fill(way)
    way.put(1)
    with caplog.at_level(logging.WARNING):
        run("ip", "link", "set", side, "down")
        try:
            error = put_error(a, way.ranges, rows((0, 0)), timeout=PATIENCE)
        finally:
            run("ip", "link", "set", side, "up")
        assert re.search(reason, str(error))
        assert not isinstance(error, DeadlineError)
        until(lambda: bool(a.poll(0.1)) or "port 1 of rx0 is up again" in caplog.text)
    assert "port 1 of rx0 is down" in caplog.text
    until(lambda: put_error(a, way.ranges, rows((0, 0))) is None)
    way.expect(array(way.source))


@contextlib.contextmanager
def netem(interface: str, *what: str) -> Iterator[None]:
    run("tc", "qdisc", "add", "dev", interface, "root", "netem", *what)
    try:
        yield
    finally:
        run("tc", "qdisc", "del", "dev", interface, "root")


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=PATIENCE)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
