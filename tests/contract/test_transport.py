"""What every transport must do: each sentence of ``transport/base.py`` as a test."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from tests.transport_kit import PATIENCE, Way, array, collect, offsets, rows, segments

from cloverinfer.core.errors import ConfigError, TransportError
from cloverinfer.transport import (
    Capabilities,
    Endpoint,
    Peer,
    RegionRef,
    Slices,
    create_endpoint,
    transport_names,
)

Make = Callable[[str], Endpoint]


@pytest.fixture(scope="module")
def embedded_ray() -> Iterator[None]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(
    params=["inproc", "shm", "null", pytest.param("ray", marks=pytest.mark.ray)], scope="module"
)
def transport(request: pytest.FixtureRequest) -> str:
    if request.param == "ray":
        request.getfixturevalue("embedded_ray")
    return str(request.param)


@pytest.fixture
def make(transport: str) -> Iterator[Make]:
    made: list[Endpoint] = []

    def create(name: str) -> Endpoint:
        made.append(create_endpoint(transport, name))
        return made[-1]

    yield create
    for endpoint in made:
        endpoint.close()
    assert segments() == []


@pytest.fixture
def pair(make: Make) -> tuple[Endpoint, Endpoint]:
    return make("a"), make("b")


# -- names, addresses, capabilities


def test_registry_knows_every_transport_and_refuses_others() -> None:
    assert set(transport_names()) >= {"inproc", "shm", "null", "ray"}
    with pytest.raises(ConfigError, match=r"'pigeon'.*inproc"):
        create_endpoint("pigeon", "a")


def test_capabilities_and_address_name_the_transport(
    transport: str, pair: tuple[Endpoint, Endpoint]
) -> None:
    a, b = pair
    assert isinstance(a.capabilities, Capabilities)
    assert a.capabilities.name == transport
    assert a.capabilities.max_message_bytes >= 4 << 20
    assert a.address().startswith(f"{transport}://")
    assert a.address() == a.address() != b.address()


# -- memory


def test_registered_sizes_are_zeroed_page_aligned_and_writable(make: Make) -> None:
    region = make("a").register(10_000)
    memory = array(region)
    assert region.ref.nbytes == region.buffer.nbytes == len(memory) == 10_000
    assert region.buffer.format == "B"
    assert not memory.any()
    assert memory.ctypes.data % mmap.PAGESIZE == 0
    memory[:] = 255
    assert region.buffer[9_999] == 255


def test_region_refs_differ_and_travel(make: Make) -> None:
    a = make("a")
    refs = [a.register(64).ref for _ in range(3)]
    assert len({ref.name for ref in refs}) == 3
    assert all(ref.address == a.address() for ref in refs)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(refs[0]), type=RegionRef) == refs[0]


def test_callers_memory_is_used_in_place(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    mine = np.arange(1000, dtype=np.uint32)
    region = a.register(memoryview(mine))
    assert region.ref.nbytes == 4000
    mine[0] = 99
    assert region.buffer[0] == 99
    target = b.register(4000)
    ranges = a.prepare(
        a.connect(b.address()),
        Slices(region, offsets(0), 4000),
        Slices(target.ref, offsets(0), 4000),
    )
    a.put(ranges, rows((0, 0)), 1)
    collect(b, notices=1)
    if b.capabilities.moves_data:
        np.testing.assert_array_equal(array(target).view(np.uint32), mine)


def test_puts_into_callers_memory_work_or_are_refused(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    mine = bytearray(64)
    source, target = a.register(64), b.register(memoryview(mine))
    array(source)[:] = 3
    peer = a.connect(b.address())
    local, remote = Slices(source, offsets(0), 64), Slices(target.ref, offsets(0), 64)
    if not b.capabilities.puts_into_any_memory:
        with pytest.raises(TransportError, match=target.ref.name):
            a.prepare(peer, local, remote)
        return
    a.put(a.prepare(peer, local, remote), rows((0, 0)), 1)
    collect(b, notices=1)
    assert mine == bytes([3 if b.capabilities.moves_data else 0]) * 64


@pytest.mark.parametrize("memory", [0, -1, memoryview(b"constant"), memoryview(bytearray())])
def test_memory_that_cannot_be_registered_is_refused(make: Make, memory: int | memoryview) -> None:
    with pytest.raises(ValueError, match=r"region|memory"):
        make("a").register(memory)


def test_puts_into_a_closed_region_fail(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=4096)
    way.put(1)
    collect(pair[1], notices=1)
    way.target.close()
    way.target.close()
    for index in (rows((0, 0)), rows()):
        with pytest.raises(TransportError):
            way.sender.put(way.ranges, index, 2, timeout=5.0)
    with pytest.raises(TransportError):
        way.cut(offsets(0), 4096)
    assert not pair[1].poll(0.05)


def test_puts_from_a_closed_region_fail(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=4096)
    way.source.close()
    with pytest.raises(TransportError, match="closed"):
        way.sender.put(way.ranges, rows((0, 0)), 2)
    with pytest.raises(TransportError, match="closed"):
        way.cut(offsets(0), 0)


def test_registering_in_a_loop_does_not_grow(
    transport: str, pair: tuple[Endpoint, Endpoint]
) -> None:
    def once() -> tuple[int, int]:
        way = Way(*pair, nbytes=8192)
        way.put(1)
        collect(pair[1], notices=1)
        way.source.close()
        way.target.close()
        del way
        return len(segments()), len(os.listdir("/proc/self/fd"))

    counts = [once() for _ in range(10 if transport == "ray" else 50)]
    # Ray opens files of its own as it likes.
    settled = [count[: 1 if transport == "ray" else 2] for count in counts[2:]]
    assert len(set(settled)) == 1


# -- peers


def test_one_peer_object_per_address(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    to_b = a.connect(b.address())
    assert isinstance(to_b, Peer)
    assert to_b.address == b.address()
    assert a.connect(b.address()) is to_b
    a.send(to_b, b"first")
    reported = collect(b, messages=1).messages[0][0]
    assert reported.address == a.address()
    b.send(reported, b"answer")
    assert collect(a, messages=1).messages == [(to_b, b"answer")]
    assert b.connect(a.address()) is reported


def test_both_sides_may_connect_first_and_meet(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    to_a = b.connect(a.address())
    to_b = a.connect(b.address())
    a.send(to_b, b"from a")
    b.send(to_a, b"from b")
    assert collect(b, messages=1).messages == [(to_a, b"from a")]
    assert collect(a, messages=1).messages == [(to_b, b"from b")]


def test_connecting_to_nobody_fails(transport: str, make: Make) -> None:
    a, gone = make("a"), make("gone")
    address = gone.address()
    gone.close()
    for nobody in (address, f"{transport}://cloverinfer-1-abc", f"{transport}://../x", "tcp://h:1"):
        with pytest.raises(TransportError):
            a.connect(nobody, timeout=5.0)


# -- prepare and put


def test_puts_move_what_the_index_says(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    draw = np.random.default_rng(1)
    source, target = a.register(1 << 16), b.register(1 << 16)
    peer = a.connect(b.address())
    array(source)[:] = draw.integers(1, 256, 1 << 16)
    want = np.zeros(1 << 16, np.uint8)
    for notice, length in enumerate([1, 3, 64, 1000, 4097]):
        at = draw.integers(0, (1 << 16) - length, 50)  # unaligned, overlapping
        to = draw.permutation(np.arange(1, (1 << 16) - length, length))[:40]
        ranges = a.prepare(peer, Slices(source, at, length), Slices(target.ref, to, length))
        count = min(len(to), 30)
        index = np.stack([draw.integers(0, 50, count), draw.permutation(len(to))[:count]], 1)
        for s, d in index:
            want[to[d] : to[d] + length] = array(source)[at[s] : at[s] + length]
        a.put(ranges, index.astype(np.int32), notice)
    assert [n for _, n in collect(b, notices=5).notices] == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(array(target), want if b.capabilities.moves_data else 0)


def test_adjoining_pieces_arrive_whole(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=1 << 14, length=1 << 10)
    array(way.source)[:] = np.random.default_rng(2).integers(1, 256, 1 << 14)
    way.put(0, np.repeat(np.arange(16, dtype=np.int32)[:, None], 2, axis=1))
    collect(pair[1], notices=1)
    way.expect(array(way.source).copy())


@pytest.mark.parametrize(
    ("sources", "targets"), [((0, 1, 2), (1, 4, 5)), ((1, 4, 5), (0, 1, 2)), ((0, 2, 1), (0, 1, 2))]
)
def test_pieces_that_adjoin_on_one_side_only(
    pair: tuple[Endpoint, Endpoint], sources: tuple[int, ...], targets: tuple[int, ...]
) -> None:
    way = Way(*pair, nbytes=60, length=10)
    array(way.source)[:] = np.arange(1, 61)
    way.put(0, rows(*zip(sources, targets, strict=True)))
    collect(pair[1], notices=1)
    want = np.zeros((6, 10), np.uint8)
    want[list(targets)] = array(way.source).reshape(6, 10)[list(sources)]
    way.expect(want.reshape(60))


@pytest.mark.parametrize("nbytes", [1, 4096, 1 << 20, 64 << 20, 256 << 20])
def test_sizes(transport: str, pair: tuple[Endpoint, Endpoint], nbytes: int) -> None:
    if nbytes > 64 << 20 and transport not in ("inproc", "shm"):
        pytest.skip("ray keeps three copies, null none")
    way = Way(*pair, nbytes=nbytes)
    whole = array(way.source)
    whole[:] = 77
    whole[:: max(nbytes // 97, 1)] = 5
    way.put(9)
    collect(pair[1], notices=1)
    way.expect(whole)


def test_empty_index_is_a_notice_alone(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=64)
    array(way.source)[:] = 1
    back = pair[1].connect(pair[0].address())
    for notice in (0, 1, 1 << 31, (1 << 32) - 1):
        way.put(notice, rows())
        assert collect(pair[1], notices=1).notices == [(back, notice)]
    assert not array(way.target).any()


def test_local_memory_may_be_reused_once_the_ticket_is_done(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    way = Way(*pair, nbytes=1 << 20)
    array(way.source)[:] = 1
    way.put(1)
    array(way.source)[:] = 2
    collect(pair[1], notices=1)
    way.expect(np.full(1 << 20, 1, np.uint8))


def test_bad_arguments_are_refused_and_move_nothing(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=256, length=64)
    array(way.source)[:] = 1
    for index in (rows((0, 0), (4, 0)), rows((0, 0), (0, 4)), rows((-1, 0)), rows((0, -1))):
        with pytest.raises(ValueError, match="index row"):
            way.sender.put(way.ranges, index, 0)
    for index in (np.zeros((1, 2), np.int64), np.zeros((2, 3), np.int32), np.zeros(2, np.int32)):
        with pytest.raises(ValueError, match="index must"):
            way.sender.put(way.ranges, index, 0)
    for notice in (-1, 1 << 32):
        with pytest.raises(ValueError, match="32 bits"):
            way.sender.put(way.ranges, rows((0, 0)), notice)
    assert not pair[1].poll(0.05)
    assert not array(way.target).any()


def test_bad_slices_are_refused(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    way = Way(a, b, nbytes=100)
    for bad in (offsets(0, 93), offsets(-1)):
        for region in (way.source, way.target.ref):
            with pytest.raises(ValueError, match="outside"):
                Slices(region, bad, 8)
    local, remote = Slices(way.source, offsets(0), 8), Slices(way.target.ref, offsets(0), 8)
    with pytest.raises(ValueError, match="differ"):
        a.prepare(way.peer, local, Slices(way.target.ref, offsets(0), 9))
    with pytest.raises(ValueError, match="local"):
        a.prepare(way.peer, Slices(way.target, offsets(0), 8), remote)
    with pytest.raises(ValueError, match="remote"):
        a.prepare(way.peer, local, Slices(way.source.ref, offsets(0), 8))
    with pytest.raises(ValueError, match="integers"):
        a.prepare(way.peer, Slices(way.source, np.array([0.5]), 8), remote)
    for ref in (
        RegionRef(b.address(), "g999", 100),
        RegionRef(b.address(), way.target.ref.name, 1 << 20),
    ):
        with pytest.raises(TransportError, match=ref.name):
            a.prepare(way.peer, local, Slices(ref, offsets(0), 8))


# -- order


def test_data_is_there_before_its_notice(transport: str, pair: tuple[Endpoint, Endpoint]) -> None:
    count, length = 64 if transport == "ray" else 2000, 4096
    way = Way(*pair, nbytes=count * length, length=length)
    array(way.source)[:] = np.repeat(np.arange(count) % 255 + 1, length)

    def sender() -> None:
        for i in range(count):
            way.put(i, rows((i, i)))

    thread = threading.Thread(target=sender)
    thread.start()
    seen = 0
    while seen < count:
        events = pair[1].poll(PATIENCE)
        assert events
        for _, notice in events.notices:
            assert notice == seen
            if pair[1].capabilities.moves_data:
                piece = array(way.target)[notice * length : (notice + 1) * length]
                assert (piece == notice % 255 + 1).all()
            seen += 1
    thread.join()


def test_puts_and_messages_arrive_in_order(transport: str, pair: tuple[Endpoint, Endpoint]) -> None:
    count = 100 if transport == "ray" else 10_000
    way = Way(*pair, nbytes=64)
    for i in range(count):
        way.put(i, rows() if i % 2 else None)
        if i % 10 == 0:
            way.sender.send(way.peer, str(i).encode())
    seen = collect(pair[1], notices=count, messages=count // 10)
    assert [n for _, n in seen.notices] == list(range(count))
    assert [int(m) for _, m in seen.messages] == list(range(0, count, 10))


def test_many_threads_put_and_send(transport: str, pair: tuple[Endpoint, Endpoint]) -> None:
    count = 20 if transport == "ray" else 2000
    way = Way(*pair, nbytes=64, length=16)

    def run(thread: int) -> None:
        for i in range(count):
            way.put(thread << 16 | i, rows((thread, thread)))
            way.sender.send(way.peer, bytes([thread]) * (i % 50))

    threads = [threading.Thread(target=run, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    seen = collect(pair[1], notices=4 * count, messages=4 * count)
    for thread in threads:
        thread.join()
    for t in range(4):
        assert [n & 0xFFFF for _, n in seen.notices if n >> 16 == t] == list(range(count))
    assert sum(len(m) for _, m in seen.messages) == 4 * sum(i % 50 for i in range(count))


def test_both_ways_at_once(transport: str, pair: tuple[Endpoint, Endpoint]) -> None:
    count = 20 if transport == "ray" else 3000
    ways = [Way(*pair, nbytes=1 << 12), Way(*reversed(pair), nbytes=1 << 12)]
    failures: list[Exception] = []

    def run(way: Way, own: Endpoint) -> None:
        try:
            for i in range(count):
                way.put(i)
            assert [n for _, n in collect(own, notices=count).notices] == list(range(count))
        except Exception as error:  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=run, args=each) for each in zip(ways, pair, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- messages


def test_messages_of_varied_sizes_wrap_around(
    transport: str, pair: tuple[Endpoint, Endpoint]
) -> None:
    a, b = pair
    peer = a.connect(b.address())
    draw = random.Random(3)
    sizes = [draw.choice([0, 1, 15, 16, 17, 1000, 30_000, 65_536, 65_537, 200_000])
             for _ in range(40 if transport == "ray" else 600)]  # fmt: skip
    thread = threading.Thread(
        target=lambda: [a.send(peer, bytes([i % 251]) * n) for i, n in enumerate(sizes)]
    )
    thread.start()
    seen = collect(b, messages=len(sizes))
    thread.join()
    assert [m for _, m in seen.messages] == [bytes([i % 251]) * n for i, n in enumerate(sizes)]


def test_large_message_arrives_even_in_the_same_thread(make: Make) -> None:
    a = make("a")
    message = np.random.default_rng(4).bytes((4 << 20) + 3)
    a.send(a.connect(a.address()), message)
    assert collect(a, messages=1).messages[0][1] == message


def test_too_long_message_is_refused(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    peer = a.connect(b.address())
    with pytest.raises(TransportError, match="at most"):
        a.send(peer, bytes(a.capabilities.max_message_bytes + 1))
    a.send(peer, b"fine")
    assert [m for _, m in collect(b, messages=1).messages] == [b"fine"]


# -- poll


def test_poll_without_anything(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    b.connect(a.address())
    for timeout in (0.0, -1.0, 0.02):
        events = a.poll(timeout)
        assert not events
        assert (events.notices, events.messages, events.tickets) == ([], [], [])


def test_poll_of_zero_sees_what_has_arrived(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    a.send(a.connect(b.address()), b"here")
    assert [m for _, m in b.poll(0.0).messages] == [b"here"]


def test_poll_waits_without_using_the_processor(make: Make) -> None:
    a = make("a")
    wall, cpu = time.monotonic(), time.thread_time()
    assert not a.poll(0.5)
    assert time.monotonic() - wall >= 0.45
    assert time.thread_time() - cpu < 0.1


def test_poll_is_woken_through_the_own_address(make: Make) -> None:
    a = make("a")
    own = a.connect(a.address())
    timer = threading.Timer(0.1, lambda: a.send(own, b"wake up"))
    timer.start()
    begun = time.monotonic()
    assert a.poll(PATIENCE).messages == [(own, b"wake up")]
    assert time.monotonic() - begun < PATIENCE / 2  # woken, not found when the time was over
    timer.join()


def test_loopback_put(make: Make) -> None:
    a = make("a")
    way = Way(a, a, nbytes=100)
    array(way.source)[:] = 6
    way.put(7)
    assert collect(a, notices=1).notices == [(way.peer, 7)]
    way.expect(np.full(100, 6, np.uint8))


# -- ends


def test_put_and_send_to_a_closed_peer_fail(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=64)
    way.put(1)
    pair[1].close()
    with pytest.raises(TransportError):
        way.sender.put(way.ranges, rows((0, 0)), 2, timeout=5.0)
    with pytest.raises(TransportError):
        way.sender.send(way.peer, b"anyone?", timeout=5.0)
    with pytest.raises(TransportError):
        way.cut(offsets(0), 64)
    with pytest.raises(TransportError):
        way.sender.connect(pair[1].address(), timeout=5.0)


def test_what_was_sent_before_the_sender_closed_arrives(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    peer = a.connect(b.address())
    a.send(peer, b"last words")
    a.send(peer, b"x" * 100_000)
    a.close()
    assert [m for _, m in collect(b, messages=2).messages] == [b"last words", b"x" * 100_000]


def test_peers_come_and_go(transport: str, make: Make) -> None:
    a = make("a")
    for i in range(3 if transport == "ray" else 20):
        b = make(f"b{i}")
        way, back = Way(a, b, nbytes=4096), Way(b, a, nbytes=4096)
        way.put(i)
        back.put(i)
        assert collect(b, notices=1).notices == [(b.connect(a.address()), i)]
        assert collect(a, notices=1).notices == [(way.peer, i)]
        for region in (way.source, back.target):
            region.close()
        b.close()


def test_closed_endpoint_refuses_everything(pair: tuple[Endpoint, Endpoint]) -> None:
    way = Way(*pair, nbytes=64)
    a = way.sender
    a.close()
    a.close()
    assert way.source.buffer.nbytes == 0
    calls: list[Callable[[], object]] = [
        lambda: a.register(64),
        lambda: a.connect(pair[1].address()),
        lambda: way.cut(offsets(0), 0),
        lambda: a.put(way.ranges, rows(), 0),
        lambda: a.send(way.peer, b""),
        lambda: a.poll(0.0),
    ]
    for call in calls:
        with pytest.raises(TransportError, match="closed"):
            call()


@pytest.mark.ray
def test_ray_endpoint_inside_an_actor(embedded_ray: None) -> None:
    import ray

    class Echo:
        def answer(self, address: str) -> str:
            with contextlib.closing(create_endpoint("ray", "actor")) as endpoint:
                peer = endpoint.connect(address)
                endpoint.send(peer, b"from an actor")
                events = endpoint.poll(PATIENCE)
                return str(events.messages[0][1])

    with contextlib.closing(create_endpoint("ray", "driver")) as ours:
        actor = ray.remote(Echo).remote()
        answer = actor.answer.remote(ours.address())
        ((peer, message),) = collect(ours, messages=1).messages
        assert message == b"from an actor"
        ours.send(peer, b"heard")
        assert ray.get(answer, timeout=PATIENCE) == str(b"heard")
        ray.kill(actor)
