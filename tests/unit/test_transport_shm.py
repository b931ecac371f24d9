"""The shm transport between real processes, and what it does about death, damage and full disks."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.transport_kit import PATIENCE, array, collect, offsets, rows, segments

from cloverinfer import _native
from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import Peer, RegionRef, Slices, _shm_link, shm
from cloverinfer.transport._shm_files import (
    create_segment,
    names,
    new_prefix,
    start_time,
    unlink,
)
from cloverinfer.transport.shm import ShmEndpoint, ShmPeer, remove_leftovers

CHILD = Path(__file__).parents[1] / "transport_child.py"
NBYTES = 1 << 16


class Child:
    """A child process and our regions for each other."""

    def __init__(self, ours: ShmEndpoint, role: str) -> None:
        self.process = subprocess.Popen([sys.executable, str(CHILD), role, ours.address()])
        self.peer, self.ref = self._met(ours)
        self.region = ours.register(NBYTES)
        self.ranges = ours.prepare(
            self.peer,
            Slices(self.region, offsets(0), NBYTES),
            Slices(self.ref, offsets(0), NBYTES),
        )

    def _met(self, ours: ShmEndpoint) -> tuple[Peer, RegionRef]:
        while True:  # what a dead predecessor has sent may come first
            for peer, message in collect(ours, messages=1).messages:
                if message.startswith(b"region "):
                    return peer, msgspec.msgpack.decode(message[7:], type=RegionRef)

    def kill(self) -> None:
        """Without waiting for it: a zombie is dead too."""
        self.process.send_signal(signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while start_time(self.process.pid) is not None:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def ours() -> Iterator[ShmEndpoint]:
    endpoint = ShmEndpoint("ours")
    yield endpoint
    endpoint.close()
    assert segments() == []


@pytest.fixture
def children(ours: ShmEndpoint) -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.process.kill()
        child.process.wait()
        remove_leftovers(child.process.pid)
        assert names(f"cloverinfer-{child.process.pid}-") == []


def start(ours: ShmEndpoint, children: list[Child], role: str) -> Child:
    children.append(Child(ours, role))
    if role != "stuck":
        ours.send(children[-1].peer, msgspec.msgpack.encode(children[-1].region.ref))
    return children[-1]


def until_refused(call: Callable[[], object]) -> tuple[int, TransportError]:
    """How often the call went well, and the error that ended it."""
    for times in range(10_000_000):
        try:
            call()
        except TransportError as error:
            return times, error
    raise AssertionError("it never failed")


def fails_in_time(ours: ShmEndpoint, child: Child) -> None:
    """Puts until there is an error, which must not be that the time was over."""
    _, error = until_refused(lambda: ours.put(child.ranges, rows(), 1, timeout=PATIENCE))
    assert not isinstance(error, DeadlineError)


# -- two processes


def test_processes_exchange_puts_and_messages(ours: ShmEndpoint, children: list[Child]) -> None:
    child = start(ours, children, "echo")
    for message in (b"", b"hello", b"y" * (1 << 20)):
        ours.send(child.peer, message)
        assert collect(ours, messages=1).messages == [(child.peer, message)]
    for i in range(0, 100, 2):
        ours.put(child.ranges, rows((0, 0)), i)
        assert collect(ours, notices=1).notices == [(child.peer, i + 1)]
    ours.send(child.peer, b"end")
    assert child.process.wait(PATIENCE) == 0
    assert names(f"cloverinfer-{child.process.pid}-") == []


@pytest.mark.parametrize("role", ["flood", "read", "stuck"])
def test_killed_peer_is_an_error_and_the_next_is_served(
    ours: ShmEndpoint, children: list[Child], role: str
) -> None:
    child = start(ours, children, role)
    if role == "flood":
        collect(ours, notices=200)
    child.kill()
    fails_in_time(ours, child)
    with pytest.raises(TransportError, match="ended"):
        ours.send(child.peer, b"x" * 100_000)
    with pytest.raises(TransportError):
        ours.connect(child.peer.address, timeout=PATIENCE)
    assert names(f"cloverinfer-{child.process.pid}-") != []
    remove_leftovers(child.process.pid)
    assert names(f"cloverinfer-{child.process.pid}-") == []

    successor = start(ours, children, "echo")
    assert successor.peer.address != child.peer.address
    ours.send(successor.peer, b"and now?")
    seen: list[tuple[Peer, bytes]] = []
    while (successor.peer, b"and now?") not in seen:  # after what the dead one had sent
        seen += collect(ours, messages=1).messages


def test_peer_killed_while_a_sender_waits_for_room(
    ours: ShmEndpoint, children: list[Child]
) -> None:
    child = start(ours, children, "stuck")
    _, error = until_refused(lambda: ours.put(child.ranges, rows(), 0, timeout=0.05))
    assert isinstance(error, DeadlineError)
    killer = subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {child.process.pid}"])
    fails_in_time(ours, child)
    killer.wait()


def test_remove_leftovers_spares_other_pid_namespaces() -> None:
    dead = 2**22 + 1  # beyond the largest pid
    foreign = create_name(f"cloverinfer-{dead}-{0:08x}abc-g1")
    own = create_name(f"{new_prefix()}-g1".replace(f"-{os.getpid()}-", f"-{dead}-"))
    try:
        assert remove_leftovers(dead) == [own]
    finally:
        unlink(foreign)


def create_name(name: str) -> str:
    create_segment(name, 1).close()
    return name


def test_remove_leftovers_spares_the_living(ours: ShmEndpoint, children: list[Child]) -> None:
    living, dead = start(ours, children, "echo"), start(ours, children, "echo")
    dead.kill()
    before = names("cloverinfer-")
    assert remove_leftovers(living.process.pid) == []
    assert remove_leftovers(os.getpid()) == []
    removed = remove_leftovers()
    assert set(removed) >= {n for n in before if f"-{dead.process.pid}-" in n} != set()
    assert names(f"cloverinfer-{living.process.pid}-") != []
    ours.send(living.peer, b"still there")
    assert collect(ours, messages=1).messages == [(living.peer, b"still there")]


def test_memory_of_the_dead_is_given_back(ours: ShmEndpoint, children: list[Child]) -> None:
    for _ in range(3):
        child = start(ours, children, "echo")
        ours.send(child.peer, b"")
        collect(ours, messages=1)
        child.kill()
        remove_leftovers(child.process.pid)
    start(ours, children, "echo")
    # One for the living: its ring here, our ring there, its region.
    assert (len(ours._rings), len(ours._mapped)) == (1, 1)
    assert sum(peer.link is not None for peer in ours._peers.values()) == 1


# -- full rings


def test_full_ring_holds_the_sender_until_there_is_room(ours: ShmEndpoint) -> None:
    other = ShmEndpoint("other")
    try:
        peer = other.connect(ours.address())
        numbers = itertools.count()
        sent, error = until_refused(
            lambda: other.send(peer, next(numbers).to_bytes(4, "little") * 1000, timeout=0.05)
        )
        assert isinstance(error, DeadlineError)
        assert sent > 100
        seen = collect(ours, messages=sent)
        other.send(peer, b"again")
        assert [m[:4] for _, m in seen.messages] == [i.to_bytes(4, "little") for i in range(sent)]
        assert [m for _, m in collect(ours, messages=1).messages] == [b"again"]
    finally:
        other.close()


def test_unread_large_messages_are_bounded(ours: ShmEndpoint) -> None:
    own = ours.connect(ours.address())
    message = b"z" * (_shm_link.INLINE_BYTES + 1)
    for _ in range(_shm_link.MOST_SPILLED):
        ours.send(own, message)
    with pytest.raises(DeadlineError, match="large"):
        ours.send(own, message, timeout=0.05)
    assert len(collect(ours, messages=_shm_link.MOST_SPILLED).messages) == _shm_link.MOST_SPILLED
    ours.send(own, message)
    assert collect(ours, messages=1).messages == [(own, message)]


def test_waiting_sender_is_woken_when_the_receiver_closes(ours: ShmEndpoint) -> None:
    other = ShmEndpoint("other")
    peer = ours.connect(other.address())
    _, error = until_refused(lambda: ours.send(peer, b"x" * 1000, timeout=0.0))
    assert isinstance(error, DeadlineError)
    closer = threading.Timer(0.2, other.close)
    closer.start()
    _, error = until_refused(lambda: ours.send(peer, b"x" * 1000, timeout=PATIENCE))
    closer.join()
    assert not isinstance(error, DeadlineError)


def test_waiting_writer_is_woken_by_the_reader() -> None:
    mailbox, ring = bytearray(4096), bytearray(4096 + 64)
    _native.format_mailbox(mailbox, 1, 2)
    _native.format_ring(ring, "shm://a")
    reader, writer = _native.MailboxReader(mailbox), _native.MailboxWriter(mailbox, ring)
    reader.add_ring(ring)
    assert writer.push(1, 0, b"x" * 48, 0.0)
    assert not writer.push(2, 0, b"", 0.0)
    timer = threading.Timer(0.1, lambda: reader.poll(0.0))
    timer.start()
    begun = time.monotonic()
    assert writer.push(2, 0, b"", PATIENCE)
    assert time.monotonic() - begun < PATIENCE / 2  # woken, not found when the time was over
    timer.join()
    assert [record[1] for record in reader.poll(0.0)] == [2]


def test_signal_handlers_run_while_poll_waits(ours: ShmEndpoint) -> None:
    def handler(number: int, frame: object) -> None:
        raise InterruptedError(number)

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(InterruptedError):
            ours.poll(PATIENCE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# -- damage


def link_to_self(ours: ShmEndpoint) -> tuple[ShmPeer, _native.MailboxWriter]:
    peer = ours.connect(ours.address())
    assert isinstance(peer, ShmPeer)
    assert peer.link is not None
    return peer, peer.link._writer


def test_records_without_meaning_are_dropped_and_counted(ours: ShmEndpoint) -> None:
    peer, writer = link_to_self(ours)
    writer.push(99, 0, b"what?", 1.0)
    writer.push(_shm_link.NOTICE, 1 << 32, b"", 1.0)
    writer.push(_shm_link.SPILLED, 5, b"../../etc/passwd", 1.0)
    writer.push(_shm_link.SPILLED, 5, b"\xff\xfe", 1.0)
    writer.push(_shm_link.SPILLED, 5, b"m00ff", 1.0)
    ours.send(peer, b"sense")
    assert collect(ours, messages=1).messages == [(peer, b"sense")]
    assert ours.dropped == 5


@pytest.mark.parametrize("nbytes", [33, 1 << 20, (1 << 32) - 1])
def test_record_longer_than_what_is_there(ours: ShmEndpoint, nbytes: int) -> None:
    peer, writer = link_to_self(ours)
    (ring_name,) = names(f"{peer.prefix}-r")
    ring = shm.open_segment(ring_name)
    writer.push(_shm_link.MESSAGE, 0, b"x" * 32, 1.0)
    ring[4096 + 4 : 4096 + 8] = nbytes.to_bytes(4, "little")
    assert not ours.poll(0.0)
    assert ours.dropped == 1
    ours.send(peer, b"sense")
    assert collect(ours, messages=1).messages == [(peer, b"sense")]


def test_rings_that_are_none_are_dropped(ours: ShmEndpoint) -> None:
    peer, writer = link_to_self(ours)
    for content in (b"?" * 10, b"?" * 10_000, bytes(10_000)):
        shm.create_segment(f"{peer.prefix}-r{len(content):x}{content[0]:x}", len(content))[:] = (
            content
        )
    stray = shm.create_segment(f"{peer.prefix}-rabc", 1 << 14)
    _native.format_ring(stray, "tcp://elsewhere")
    writer.announce()
    ours.send(peer, b"sense")
    assert collect(ours, messages=1).messages == [(peer, b"sense")]
    assert ours.dropped == 4


def test_native_checks_what_it_is_given() -> None:
    memory = bytearray(1 << 13)
    with pytest.raises(TransportError):
        _native.MailboxReader(memory)
    _native.format_mailbox(memory, 1, 2)
    assert _native.mailbox_owner(memory) == (1, 2)
    reader = _native.MailboxReader(memory)
    ring = bytearray(4096 + 64)
    _native.format_ring(ring, "shm://a")
    with pytest.raises(ValueError, match="ring"):
        reader.finished(0, False)
    with pytest.raises(ValueError, match="ring"):
        reader.remove_ring(3)
    writer = _native.MailboxWriter(memory, ring)
    with pytest.raises(ValueError, match="longer"):
        writer.push(1, 0, b"x" * 49, 0.0)
    with pytest.raises(ValueError, match="name"):
        _native.format_ring(bytearray(1 << 13), "x" * 300)
    with pytest.raises(TypeError):
        _native.copy_ranges(memory, np.zeros(1), memory, np.zeros(1), 1, rows((0, 0)))
    with pytest.raises(ValueError, match="outside"):
        _native.copy_ranges(memory, offsets(0), memory, offsets(0), -1, rows((0, 0)))
    with pytest.raises(BufferError):
        _native.copy_ranges(b"constant", offsets(0), memory, offsets(0), 1, rows((0, 0)))


# -- segments


def test_full_shared_memory_is_a_clear_error(
    ours: ShmEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ours.connect(ours.address())
    before = segments()

    def full(fd: int, start: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TransportError, match="no room for"):
        ours.register(1 << 20)
    with pytest.raises(TransportError, match="no room for"):
        ours.send(own, b"x" * (1 << 20))
    with pytest.raises(TransportError, match="no room for"):
        ShmEndpoint("another")
    assert segments() == before


def test_segments_take_their_memory_at_once_and_are_private(ours: ShmEndpoint) -> None:
    region = ours.register(1 << 20)
    status = os.stat(f"/dev/shm/{ours._prefix}-{region.ref.name}")
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= 1 << 20
    assert array(region).nbytes == 1 << 20


def test_start_time_tells_the_living_from_the_dead() -> None:
    assert start_time(os.getpid()) == start_time(os.getpid()) is not None
    process = subprocess.Popen([sys.executable, "-c", ""])
    end = time.monotonic() + PATIENCE
    while start_time(process.pid) is not None:  # a zombie counts as dead
        assert time.monotonic() < end
        time.sleep(0.01)
    process.wait()
    assert start_time(process.pid) is None


def test_callers_memory_that_was_taken_back_is_not_written_to() -> None:
    a, b = ShmEndpoint("a"), ShmEndpoint("b")
    mine = bytearray(64)
    source, target = a.register(64), b.register(memoryview(mine))
    source.buffer[:] = bytes([7]) * 64
    peer = a.connect(b.address())
    at = np.zeros(1, np.int64)
    ranges = a.prepare(peer, Slices(source, at, 64), Slices(target.ref, at, 64))
    target.close()
    with pytest.raises(TransportError, match="closed"):
        a.put(ranges, np.zeros((1, 2), np.int32), 1)
    assert mine == bytes(64)
    for endpoint in (a, b):
        endpoint.close()
