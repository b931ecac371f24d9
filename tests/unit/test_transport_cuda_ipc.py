"""The cuda_ipc transport with device memory: over a fake driver, and over a device where one is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.cuda_kit import AnyDriver, FakeDriver, RealDriver
from tests.transport_kit import PATIENCE, array, collect, finish, offsets, put_error, rows, segments

from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import (
    DeviceMemory,
    Peer,
    Ranges,
    Region,
    Slices,
    _cuda_lane,
    cuda_ipc,
    missing,
)
from cloverinfer.transport._cuda_lane import Copies, Flag, runs
from cloverinfer.transport.cuda_ipc import CudaIpcEndpoint

no_device = missing("cuda_ipc")
Make = Callable[[str], CudaIpcEndpoint]


@pytest.fixture(
    params=[
        "fake",
        pytest.param("real", marks=pytest.mark.skipif(bool(no_device), reason=no_device)),
    ]
)
def driver(request: pytest.FixtureRequest) -> AnyDriver:
    return FakeDriver() if request.param == "fake" else RealDriver()


@pytest.fixture
def fake() -> FakeDriver:
    return FakeDriver()


def endpoints(driver: AnyDriver) -> Iterator[Make]:
    made: list[CudaIpcEndpoint] = []

    def create(name: str) -> CudaIpcEndpoint:
        made.append(CudaIpcEndpoint(name, driver=driver))
        return made[-1]

    yield create
    for endpoint in made:
        endpoint.close()
    assert segments() == []
    if isinstance(driver, FakeDriver):
        assert (driver.pinned, driver.retained) == ({}, 0)
        assert not any(driver.opened.values())


@pytest.fixture
def make(driver: AnyDriver) -> Iterator[Make]:
    yield from endpoints(driver)


@pytest.fixture
def make_fake(fake: FakeDriver) -> Iterator[Make]:
    yield from endpoints(fake)


class Place:
    """A region of either kind, which the test reads and writes as bytes."""

    def __init__(
        self, endpoint: CudaIpcEndpoint, driver: AnyDriver, kind: str, nbytes: int
    ) -> None:
        self.driver = driver
        self.memory: DeviceMemory | None = None
        if kind == "cuda":
            # Inside an allocation, as the blocks of a pool are.
            whole = driver.allocate(nbytes + 512)
            self.memory = DeviceMemory(whole.pointer + 256, nbytes, 0)
        self.region: Region = endpoint.register(self.memory or nbytes)

    def write(self, data: np.ndarray) -> None:
        if self.memory is not None:
            self.driver.write(self.memory.pointer, data)
        else:
            array(self.region)[:] = data

    def read(self) -> np.ndarray:
        if self.memory is not None:
            return self.driver.read(self.memory.pointer, self.memory.nbytes)
        return array(self.region).copy()


class DeviceWay:
    """From one endpoint to another between two kinds of memory."""

    def __init__(self, make: Make, driver: AnyDriver, kinds: str = "cuda-cuda", nbytes: int = 4096):
        self.a, self.b = make("a"), make("b")
        kind_a, kind_b = kinds.split("-")
        self.source = Place(self.a, driver, kind_a, nbytes)
        self.target = Place(self.b, driver, kind_b, nbytes)
        self.peer: Peer = self.a.connect(self.b.address())

    def cut(self, at: np.ndarray, to: np.ndarray, length: int) -> Ranges:
        return self.a.prepare(
            self.peer,
            Slices(self.source.region, at.astype(np.int64), length),
            Slices(self.target.region.ref, to.astype(np.int64), length),
        )

    @property
    def whole(self) -> Ranges:
        return self.cut(offsets(0), offsets(0), self.source.region.ref.nbytes)


KINDS = ["cuda-cuda", "cuda-host", "host-cuda", "host-host"]


def noise(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


# -- absence and arguments


def test_missing_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "load_library", lambda: None)
    assert "install NVIDIA's driver" in missing("cuda_ipc")
    monkeypatch.setattr(cuda_ipc, "load_library", object)
    monkeypatch.setattr(cuda_ipc, "Driver", lambda: FakeDriver(devices=0))
    assert "CUDA_VISIBLE_DEVICES" in missing("cuda_ipc")
    monkeypatch.setattr(cuda_ipc, "Driver", FakeDriver)
    assert missing("cuda_ipc") == ""


def test_memory_that_cannot_be_registered_is_refused(make_fake: Make, fake: FakeDriver) -> None:
    a = make_fake("a")
    memory = fake.allocate(4096)
    for bad in (
        DeviceMemory(memory.pointer, 0, 0),
        DeviceMemory(memory.pointer, 4096, 2),
        DeviceMemory(memory.pointer, 4096, -1),
        DeviceMemory(memory.pointer + 1, 4096, 0),
    ):
        with pytest.raises(ValueError, match=r"memory|outside"):
            a.register(bad)
    with pytest.raises(TransportError):
        a.register(DeviceMemory(64, 64, 0))
    assert a.register(memory).buffer.nbytes == 0


def test_memory_that_cannot_be_shared_says_what_to_do(
    make_fake: Make, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(base: int) -> bytes:
        raise TransportError("cuIpcGetMemHandle: invalid argument (1)")

    monkeypatch.setattr(fake, "export", refuse)
    with pytest.raises(TransportError, match="expandable segments"):
        make_fake("a").register(fake.allocate(4096))


# -- puts


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("length", [1, 48, 1000, 4096, 40_000])
def test_puts_move_what_the_index_says(
    make: Make, driver: AnyDriver, kinds: str, length: int
) -> None:
    nbytes = 1 << 20
    way = DeviceWay(make, driver, kinds, nbytes)
    data = noise(length, nbytes)
    way.source.write(data)
    draw = np.random.default_rng(length)
    count = min(nbytes // length, 200)
    step = 16 if length % 16 == 0 else 1
    at = draw.integers(0, (nbytes - length) // step, count) * step
    to = draw.permutation(nbytes // length)[:count] * length
    index = np.stack([draw.integers(0, count, count), draw.permutation(count)], 1)[: count * 3 // 4]
    want = np.zeros(nbytes, np.uint8)
    for s, d in index:
        want[to[d] : to[d] + length] = data[at[s] : at[s] + length]
    ticket = way.a.put(way.cut(at, to, length), index.astype(np.int32), 7)
    assert [n for _, n in collect(way.b, notices=1).notices] == [7]
    np.testing.assert_array_equal(way.target.read(), want)
    finish(way.a, ticket)
    assert ticket.error is None


@pytest.mark.parametrize("kinds", KINDS)
def test_empty_puts_and_long_ones(make: Make, driver: AnyDriver, kinds: str) -> None:
    way = DeviceWay(make, driver, kinds, 8 << 20)
    ticket = way.a.put(way.whole, rows(), (1 << 32) - 1)
    assert [n for _, n in collect(way.b, notices=1).notices] == [(1 << 32) - 1]
    assert not way.target.read().any()
    data = noise(1, 8 << 20)
    way.source.write(data)
    second = way.a.put(way.whole, rows((0, 0)), 0)
    collect(way.b, notices=1)
    np.testing.assert_array_equal(way.target.read(), data)
    finish(way.a, ticket, second)


def test_more_pieces_than_the_table_holds(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver, nbytes=1 << 21)
    data = noise(2, 1 << 21)
    way.source.write(data)
    at = np.arange(0, 1 << 21, 16)
    order = np.random.default_rng(3).permutation(len(at))
    ranges = way.cut(at, at[order], 16)
    index = np.repeat(np.arange(len(at), dtype=np.int32)[:, None], 2, axis=1)
    assert len(at) > _cuda_lane._TABLE_ROWS
    ticket = way.a.put(ranges, index, 1)
    collect(way.b, notices=1)
    want = np.empty_like(data).reshape(-1, 16)
    want[order] = data.reshape(-1, 16)
    np.testing.assert_array_equal(way.target.read(), want.reshape(-1))
    finish(way.a, ticket)
    # Once more with all rows free again.
    collect_after(way, ranges, index)


def collect_after(way: DeviceWay, ranges: Ranges, index: np.ndarray) -> None:
    ticket = way.a.put(ranges, index, 2)
    assert [n for _, n in collect(way.b, notices=1).notices] == [2]
    finish(way.a, ticket)


def test_everything_arrives_in_order_and_after_its_data(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver, nbytes=1 << 16)
    host = way.b.register(64)
    mine = way.a.register(64)
    beside = way.a.prepare(way.peer, Slices(mine, offsets(0), 64), Slices(host.ref, offsets(0), 64))
    way.source.write(np.full(1 << 16, 9, np.uint8))
    at = np.arange(0, 1 << 16, 1 << 10)
    ranges = way.cut(at, at, 1 << 10)
    tickets = []
    for i in range(0, 192, 3):
        tickets.append(way.a.put(ranges, rows((i // 3, i // 3)), i))
        way.a.send(way.peer, str(i + 1).encode())
        tickets.append(way.a.put(beside, rows((0, 0)), i + 2))
    seen: list[int] = []
    while len(seen) < 192:
        events = way.b.poll(PATIENCE)
        seen += [n for _, n in events.notices] + [int(m) for _, m in events.messages]
        for _, notice in events.notices:
            if notice % 3 == 0:
                piece = way.target.read()[(notice // 3) << 10 : (notice // 3 + 1) << 10]
                assert (piece == 9).all()
    assert sorted(seen) == list(range(192))
    finish(way.a, *tickets)


def test_put_waits_for_its_event(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver)
    event, fire = driver.event()
    way.source.write(np.full(4096, 1, np.uint8))
    ticket = way.a.put(way.whole, rows((0, 0)), 5, after=event)
    assert not way.b.poll(0.1)
    assert not ticket.done
    fire()
    assert [n for _, n in collect(way.b, notices=1).notices] == [5]
    finish(way.a, ticket)
    np.testing.assert_array_equal(way.target.read(), np.full(4096, 1, np.uint8))


def test_host_put_waits_for_its_event(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver, "host-host")
    happened, fire = driver.event()
    fire()
    finish(way.a, way.a.put(way.whole, rows((0, 0)), 4, after=happened))
    collect(way.b, notices=1)
    event, fire = driver.event()
    ticket = way.a.put(way.whole, rows((0, 0)), 5, after=event)
    assert not way.b.poll(0.05)
    way.source.write(np.full(4096, 3, np.uint8))
    fire()
    collect(way.b, notices=1)
    finish(way.a, ticket)
    np.testing.assert_array_equal(way.target.read(), np.full(4096, 3, np.uint8))


def test_allocation_of_another_process_is_opened_once(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake)
    (offer,) = way.b._offers.values()
    offer._page[4:12] = (1).to_bytes(8, "little")  # as if process 1 had offered it
    ranges = [way.whole, way.whole]
    assert list(fake.opened.values()) == [1]
    way.source.write(noise(4, 4096))
    for one in ranges:
        ticket = way.a.put(one, rows((0, 0)), 1)
        collect(way.b, notices=1)
        finish(way.a, ticket)
    np.testing.assert_array_equal(way.target.read(), way.source.read())
    way.a.close()
    assert list(fake.opened.values()) == [0]


# -- notices, tickets and threads


def test_nothing_is_told_before_the_device_is_done(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake)
    with fake.held():
        ticket = way.a.put(way.whole, rows((0, 0)), 5)
        way.a.send(way.peer, b"behind it")
        assert not way.b.poll(0.05)
        assert not way.a.poll(0.05)
        assert not ticket.done
    seen = collect(way.b, notices=1, messages=1)
    assert ([n for _, n in seen.notices], [m for _, m in seen.messages]) == ([5], [b"behind it"])
    finish(way.a, ticket)


def test_poll_that_sleeps_is_told_of_another_threads_put(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver)
    ranges = way.whole
    putter = threading.Timer(0.2, lambda: way.a.put(ranges, rows((0, 0)), 1))
    putter.start()
    begun = time.monotonic()
    events = way.a.poll(PATIENCE)
    assert [ticket.error for ticket in events.tickets] == [None]
    assert time.monotonic() - begun < PATIENCE / 2
    putter.join()


def test_ticket_of_a_device_that_hangs_ends_in_time(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake)
    with fake.held():
        ticket = way.a.put(way.whole, rows((0, 0)), 5, timeout=0.1)
        finish(way.a, ticket)
        assert isinstance(ticket.error, DeadlineError)
        assert ticket.late
    assert not way.a.poll(0.1).tickets  # told once
    assert not ticket.late  # it has copied after all


def test_ticket_of_a_device_that_fails_says_why(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake)
    with fake.held():
        ticket = way.a.put(way.whole, rows((0, 0)), 5)
        fake.failed = True
        finish(way.a, ticket)
    assert "illegal memory access" in str(ticket.error)
    assert not way.b.poll(0.05)


def test_full_table_holds_the_sender_until_its_deadline(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake, nbytes=1 << 20)
    at = np.arange(0, 1 << 20, 64)
    ranges = way.cut(at, at[::-1], 64)
    index = np.repeat(np.arange(len(at), dtype=np.int32)[:, None], 2, axis=1)
    with fake.held():
        for i in range(_cuda_lane._TABLE_ROWS // len(at)):
            way.a.put(ranges, index, i)
        with pytest.raises(DeadlineError):
            way.a.put(ranges, index, 99, timeout=0.1)
    collect(way.b, notices=4)


def test_flags_go_on_beyond_32_bits() -> None:
    word = np.zeros(1, np.uint32)
    flag = Flag(word, 0)
    assert not _cuda_lane.reached(word, flag.next())
    flag.last = (1 << 32) - 2
    word[0] = flag.last
    numbers = [flag.next() for _ in range(3)]
    assert numbers == [(1 << 32) - 1, 0, 1]
    assert not any(_cuda_lane.reached(word, number) for number in numbers)
    word[0] = 0
    assert [_cuda_lane.reached(word, number) for number in numbers] == [True, True, False]


def test_pieces_that_adjoin_become_one_run() -> None:
    def run(targets: list[int], sources: list[int]) -> list[list[int]]:
        return [
            array.tolist()
            for array in runs(Copies(np.array(targets, np.uint64), np.array(sources, np.uint64), 8))
        ]

    assert run([0, 8, 16], [100, 108, 116]) == [[0], [100], [24]]
    assert run([0, 8, 24], [100, 108, 124]) == [[0, 24], [100, 124], [16, 8]]
    assert run([0, 8], [108, 100]) == [[0, 8], [108, 100], [8, 8]]
    assert run([4], [7]) == [[4], [7], [8]]


def test_few_large_or_unaligned_pieces_go_to_the_copy_engines(
    make_fake: Make, fake: FakeDriver
) -> None:
    way = DeviceWay(make_fake, fake, nbytes=1 << 16)
    at = np.arange(0, 1 << 16, 1 << 12)
    every_other = np.repeat(np.arange(0, 16, 2, dtype=np.int32)[:, None], 2, axis=1)
    for ranges, index, how in (
        (way.cut(at, at, 1 << 12), every_other, "launch"),
        (way.cut(at, at, 1 << 12), every_other[:2], "copy"),
        (way.cut(at, at, 1000), every_other, "copy"),
        (way.cut(at + 8, at, 16), every_other, "copy"),
        (way.whole, rows((0, 0)), "copy"),
    ):
        fake.calls.clear()
        finish(way.a, way.a.put(ranges, index, 1))
        assert fake.calls[-1] == how
    collect(way.b, notices=5)


# -- ends


@pytest.mark.parametrize("kinds", KINDS[:3])
def test_closed_regions_are_refused(make: Make, driver: AnyDriver, kinds: str) -> None:
    way = DeviceWay(make, driver, kinds)
    ranges = way.whole
    way.target.region.close()
    way.target.region.close()
    for index in (rows((0, 0)), rows()):
        assert put_error(way.a, ranges, index)
    with pytest.raises(TransportError):
        way.whole  # noqa: B018
    way.source.region.close()
    with pytest.raises(TransportError, match="closed"):
        way.a.put(ranges, rows((0, 0)), 1)
    assert not way.b.poll(0.05)


def test_bad_refs_and_indices_are_refused(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver)
    ranges = way.whole
    for index in (rows((1, 0)), rows((0, 1)), rows((-1, 0))):
        with pytest.raises(ValueError, match="index row"):
            way.a.put(ranges, index, 0)
    with pytest.raises(ValueError, match="32 bits"):
        way.a.put(ranges, rows((0, 0)), -1)
    ref = way.target.region.ref
    for name, nbytes in (("d99", 4096), (ref.name, 1 << 30)):
        bad = type(ref)(ref.address, name, nbytes)
        with pytest.raises(TransportError, match=name):
            way.a.prepare(
                way.peer,
                Slices(way.source.region, offsets(0), 64),
                Slices(bad, offsets(0), 64),
            )
    assert not way.b.poll(0.05)


def test_closing_waits_for_what_is_under_way(make_fake: Make, fake: FakeDriver) -> None:
    way = DeviceWay(make_fake, fake)
    way.source.write(noise(6, 4096))
    fake.going.clear()
    ticket = way.a.put(way.whole, rows((0, 0)), 5)
    threading.Timer(0.2, fake.going.set).start()
    way.a.close()
    assert ticket.done
    assert [n for _, n in collect(way.b, notices=1).notices] == [5]
    np.testing.assert_array_equal(way.target.read(), way.source.read())


def test_put_to_a_closed_endpoint_fails(make: Make, driver: AnyDriver) -> None:
    way = DeviceWay(make, driver)
    ranges = way.whole
    way.b.close()
    assert put_error(way.a, ranges, rows((0, 0)))


def test_copies_of_a_dead_sender_are_dropped_and_what_follows_is_not(
    make_fake: Make, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    way = DeviceWay(make_fake, fake)
    with fake.held():
        way.a.put(way.whole, rows((0, 0)), 5)
        way.a.send(way.peer, b"last words")
        assert not way.b.poll(0.05)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(cuda_ipc.os, "getpid", lambda: 1)
            elsewhere.setattr(cuda_ipc, "start_time", lambda pid: None)
            assert [m for _, m in collect(way.b, messages=1).messages] == [b"last words"]
    assert way.b.dropped == 1


def test_records_without_meaning_are_dropped(make_fake: Make) -> None:
    a, b = make_fake("a"), make_fake("b")
    peer = a.connect(b.address())
    with a._link(peer, time.monotonic() + 1) as link:
        for payload in (b"", b"x" * 8, (4096).to_bytes(4, "little") * 2):
            link.push(cuda_ipc._ON_DEVICE, 1, payload, time.monotonic() + 1)
    a.send(peer, b"sense")
    assert [m for _, m in collect(b, messages=1).messages] == [b"sense"]
    assert b.dropped == 3


def test_peers_and_regions_come_and_go_without_growth(make: Make, driver: AnyDriver) -> None:
    a = make("a")
    source = Place(a, driver, "cuda", 4096)
    for i in range(20):
        b = make(f"b{i}")
        for kind in ("cuda", "host"):
            target = Place(b, driver, kind, 4096)
            ranges = a.prepare(
                a.connect(b.address()),
                Slices(source.region, offsets(0), 4096),
                Slices(target.region.ref, offsets(0), 4096),
            )
            finish(a, a.put(ranges, rows((0, 0)), i))
            collect(b, notices=1)
            target.region.close()
        b.close()
    a.connect(a.address())
    assert (len(a._targets), len(a._flags), a._pins.names()) == (0, 0, [])
