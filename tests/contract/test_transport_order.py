"""What every transport must do: order, messages, polling and ends."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
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
    offsets,
    put_error,
    rows,
    settle,
    until_refused,
    way_error,
)

from cloverinfer.core.errors import TransportError
from cloverinfer.transport import Endpoint, Put, Slices, Ticket, create_endpoint

# -- order


def test_data_is_there_before_its_notice(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    count, length = wire.count(2000), 4096
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


def test_later_puts_overwrite_earlier_ones(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    """Whatever their sizes, and without waiting for any of them."""
    nbytes, piece = 4 << 20, 16 << 10
    way = Way(*pair, nbytes=nbytes, length=piece)
    draw = np.random.default_rng(7)
    array(way.source)[:] = draw.integers(1, 256, nbytes)
    source = array(way.source).reshape(-1, piece)
    want, tickets = np.zeros_like(source), []
    for notice in range(wire.count(150)):
        # A whole region, parts of it, single pieces; scattered and adjoining.
        count = int(draw.choice([1, 2, 40, 100, len(source)]))
        index = np.stack([draw.permutation(len(source))[:count], np.arange(count)], 1)
        index[:, 1] += draw.integers(0, len(source) - count + 1)
        want[index[:, 1]] = source[index[:, 0]]
        tickets.append(way.start(notice, index.astype(np.int32)))
    settle(pair[0], *tickets)
    collect(pair[1], notices=len(tickets))
    way.expect(want.reshape(nbytes))


def test_many_puts_at_once_arrive_in_order(pair: tuple[Endpoint, Endpoint]) -> None:
    """Into memory of the caller's where peers can write there, else into the endpoint's own."""
    a, b = pair
    layers, size = 5, 1 << 12
    memory = np.zeros(layers * size, np.uint8)
    anywhere = b.capabilities.puts_into_any_memory
    source = a.register(layers * size)
    target = b.register(memoryview(memory) if anywhere else layers * size)
    want = np.random.default_rng(0).integers(0, 256, layers * size, np.uint8)
    array(source)[:] = want
    peer, half = a.connect(b.address()), np.arange(2, dtype=np.int64) * (size // 2)
    ranges = [
        a.prepare(
            peer,
            Slices(source, half + i * size, size // 2),
            Slices(target.ref, half + i * size, size // 2),
        )
        for i in range(layers)
    ]
    both = rows((0, 0), (1, 1))
    assert a.put_many([]) == []
    settle(a, *a.put_many([Put(each, both, 100 + i) for i, each in enumerate(ranges)]))
    seen = collect(b, notices=layers).notices
    assert [(peer.address, notice) for peer, notice in seen] == [
        (a.address(), 100 + i) for i in range(layers)
    ]
    if b.capabilities.moves_data:
        assert np.array_equal(array(target), want)


def test_what_follows_a_put_that_cannot_be_made_is_not_tried(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    way, both = Way(*pair, 4096, 1024), rows((0, 0), (1, 1))
    puts = [Put(way.ranges, index, 7 + i) for i, index in enumerate((both, rows((0, 9)), both))]
    tickets = way.sender.put_many(puts)
    settle(way.sender, tickets[0])
    assert [type(ticket.error) for ticket in tickets[1:]] == [ValueError] * 2
    assert all(ticket.done for ticket in tickets)
    way.put(10)
    assert [notice for _, notice in collect(way.receiver, notices=2).notices] == [7, 10]


def test_puts_and_messages_arrive_in_order(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    count = wire.count(10_000)
    way = Way(*pair, nbytes=64)
    tickets = []
    for i in range(count):
        tickets.append(way.start(i, rows() if i % 2 else None))
        if i % 10 == 0:
            way.sender.send(way.peer, str(i).encode())
    settle(way.sender, *tickets)
    seen = collect(pair[1], notices=count, messages=count // 10)
    assert [n for _, n in seen.notices] == list(range(count))
    assert [int(m) for _, m in seen.messages] == list(range(0, count, 10))


def test_many_threads_put_and_send(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    count = wire.count(2000)
    way = Way(*pair, nbytes=64, length=16)
    tickets: list[Ticket] = []

    def run(thread: int) -> None:
        for i in range(count):
            tickets.append(way.start(thread << 16 | i, rows((thread, thread))))
            way.sender.send(way.peer, bytes([thread]) * (i % 50))

    threads = [threading.Thread(target=run, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    seen = collect(pair[1], notices=4 * count, messages=4 * count)
    for thread in threads:
        thread.join()
    settle(way.sender, *tickets)
    for t in range(4):
        assert [n & 0xFFFF for _, n in seen.notices if n >> 16 == t] == list(range(count))
    assert sum(len(m) for _, m in seen.messages) == 4 * sum(i % 50 for i in range(count))


def test_both_ways_at_once(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    count = wire.count(3000)
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


def test_notices_wrap_around(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    count = wire.count(50_000)
    way = Way(*pair, nbytes=64)
    tickets: list[Ticket] = []
    thread = threading.Thread(
        target=lambda: tickets.extend(way.start(i, rows()) for i in range(count))
    )
    thread.start()
    seen = collect(pair[1], notices=count)
    thread.join()
    settle(way.sender, *tickets)
    assert [n for _, n in seen.notices] == list(range(count))


# -- messages


def test_messages_of_varied_sizes_wrap_around(wire: Wire, pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    peer = a.connect(b.address())
    draw = random.Random(3)
    sizes = [draw.choice([0, 1, 15, 16, 17, 1000, 30_000, 65_536, 65_537, 200_000])
             for _ in range(wire.count(600))]  # fmt: skip
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
    seen = b.poll(0.0)
    end = time.monotonic() + PATIENCE
    while not seen and time.monotonic() < end:
        seen = b.poll(0.0)
    assert [m for _, m in seen.messages] == [b"here"]


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
    assert put_error(way.sender, way.ranges, rows((0, 0)))
    until_refused(lambda: way.sender.send(way.peer, b"anyone?", timeout=5.0))
    assert way_error(way.sender, way.peer, *way.slices(offsets(0), 64))
    with pytest.raises(TransportError):
        way.sender.connect(pair[1].address(), timeout=5.0)


@pytest.mark.ray
def test_a_closed_ray_endpoint_refuses_although_its_actor_still_lives(
    embedded_ray: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray ends an actor some time after it was asked to."""
    from cloverinfer.transport import ray as wire

    a, b = wire.RayEndpoint("a"), wire.RayEndpoint("b")
    way = Way(a, b, nbytes=64)
    way.put(1)
    with monkeypatch.context() as patch:
        patch.setattr(wire.ray, "kill", lambda _: None)
        b.close()
    with pytest.raises(TransportError, match="closed"):
        a.put(way.ranges, rows((0, 0)), 2)
    with pytest.raises(TransportError, match="closed"):
        a.send(way.peer, b"anyone?")
    wire.ray.kill(b._mailbox)
    a.close()


def test_what_was_sent_before_the_sender_closed_arrives(pair: tuple[Endpoint, Endpoint]) -> None:
    a, b = pair
    peer = a.connect(b.address())
    a.send(peer, b"last words")
    a.send(peer, b"x" * 100_000)
    a.close()
    assert [m for _, m in collect(b, messages=2).messages] == [b"last words", b"x" * 100_000]


def test_peers_come_and_go(wire: Wire, make: Make) -> None:
    a = make("a")
    for i in range(wire.count(20)):
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


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_closing_in_a_forked_process_leaves_the_endpoint_alone(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    way = Way(*pair, nbytes=64)
    child = os.fork()
    if child == 0:
        try:
            for endpoint in pair:
                endpoint.close()
        finally:
            os._exit(0)
    end = time.monotonic() + PATIENCE
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    way.put(1)
    assert collect(pair[1], notices=1).notices[0][1] == 1
    assert time.monotonic() < end, "the child hung"


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
