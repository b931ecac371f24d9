"""Peers of tcp endpoints that break the rules of the wire, or stop reading, or die half way."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.tcp_stranger import (
    ANSWER,
    ANSWER_MAGIC,
    DONE,
    MESSAGE,
    NO_REGION,
    PUT,
    QUERY,
    Frame,
    Make,
    StrangeListener,
    ended,
    endpoints,
    link_to,
    message,
    serves,
    stranger_address,
    until,
)
from tests.transport_kit import (
    PATIENCE,
    array,
    collect,
    finish,
    offsets,
    rows,
    settle,
    until_refused,
)

from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import Endpoint, Peer, RegionRef, Slices
from cloverinfer.transport.tcp import TcpRanges


@pytest.fixture
def make() -> Iterator[Make]:
    with endpoints() as create:
        yield create


# -- frames that break the rules

BIG = (1 << 64) - 1


@pytest.mark.parametrize(
    "frame",
    [
        Frame(magic=1),
        Frame(kind=0),
        Frame(kind=99),
        Frame(reserved=1),
        Frame(seq=16384),
        Frame(seq=BIG),
        Frame(total=4),
        Frame(total=1 << 41),
        Frame(total=0),
        Frame(offset=1),
        Frame(nbytes=9),
        Frame(nbytes=7),
        Frame(nbytes=0, runs=(), payload=b""),
        Frame(nbytes=(1 << 20) + 1, total=1 << 21, runs=((0, (1 << 20) + 1),)),
        Frame(count=513),
        Frame(count=(1 << 32) - 1),
        Frame(runs=()),
        Frame(runs=((0, 4),)),
        Frame(runs=((0, 4), (4, 0), (4, 4))),
        Frame(runs=((57, 8),)),
        Frame(runs=((64, 8),)),
        Frame(runs=((BIG - 3, 8),)),
        Frame(runs=((0, BIG), (0, 9))),
        Frame(runs=((BIG, 8),), region=2),
        message(b"x", total=(64 << 20) + 1),
        message(b"x", offset=1),
        message(b"x", offset=BIG),
        message(b"x", total=2, count=1),
        Frame(kind=QUERY, total=64),
        Frame(kind=QUERY, total=64, nbytes=0, count=1, payload=b""),
    ],
)
def test_frames_that_cannot_be_cost_their_link(make: Make, frame: Frame) -> None:
    a = make()
    region = a.register(64)
    with link_to(a) as (sock,):
        with contextlib.suppress(ConnectionError):
            sock.sendall(frame.pack())
        assert ended(sock)
    assert a.dropped == 1
    assert not array(region).any()
    assert not a.poll(0.0)
    serves(a)


@pytest.mark.parametrize(
    "frames",
    [
        [Frame(), Frame()],
        [Frame(total=16), Frame(total=16, notice=8)],
        [Frame(total=16), Frame(total=16, region=2)],
        [Frame(total=16), Frame(total=24)],
        [Frame(total=12), Frame(total=12)],
        [Frame(seq=1, total=16), Frame(seq=1, total=16), Frame(seq=1, total=16)],
        [Frame(seq=1), message(b"x" * 8, seq=1)],
        [message(b"x" * 4, total=8), message(b"x" * 5, total=8, offset=3)],
    ],
)
def test_frames_that_contradict_each_other_cost_their_link(make: Make, frames: list[Frame]) -> None:
    a = make()
    a.register(64)
    with link_to(a) as (sock,):
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"".join(frame.pack() for frame in frames))
        assert ended(sock)
    assert a.dropped == 1
    serves(a)


def read_answers(sock: socket.socket, count: int) -> list[tuple[int, int]]:
    """(outcome, seq) of each."""
    data = sock.recv(count * ANSWER.size, socket.MSG_WAITALL)
    answers = [ANSWER.unpack_from(data, at) for at in range(0, len(data), ANSWER.size)]
    assert all(magic == ANSWER_MAGIC for magic, _, _ in answers)
    return [(outcome, seq) for _, outcome, seq in answers]


def test_unknown_region_is_answered_and_nothing_is_written(make: Make) -> None:
    a = make()
    region = a.register(64)
    with link_to(a) as (sock,):
        sock.sendall(Frame(region=2).pack())
        assert read_answers(sock, 2) == [(NO_REGION, 0), (DONE, 0)]
        sock.sendall(Frame(seq=1).pack())
        assert read_answers(sock, 1) == [(DONE, 1)]
    assert [n for _, n in collect(a, notices=1).notices] == [7]
    assert bytes(region.buffer[:9]) == b"\xff" * 8 + b"\0"


def test_ops_wait_for_those_before_them(make: Make) -> None:
    a = make()
    a.register(64)
    with link_to(a, streams=2) as (first, second):
        second.sendall(Frame(seq=2, notice=2).pack() + message(b"one", seq=1).pack())
        assert not a.poll(0.1)
        first.sendall(Frame(seq=0, notice=0, total=16).pack())
        assert not a.poll(0.1)
        second.sendall(Frame(seq=0, notice=0, total=16, runs=((8, 8),)).pack())
        seen = collect(a, notices=2, messages=1)
        assert [n for _, n in seen.notices] == [0, 2]
        assert [m for _, m in seen.messages] == [b"one"]


def test_frames_may_come_byte_by_byte(make: Make) -> None:
    a = make()
    region = a.register(64)
    frames = Frame(runs=((0, 3), (9, 5)), payload=bytes(range(1, 9))), message(b"abc", seq=1)
    with link_to(a) as (sock,):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"".join(frame.pack() for frame in frames):
            sock.send(bytes([byte]))
        seen = collect(a, notices=1, messages=1)
    assert seen.messages[0][1] == b"abc"
    assert bytes(region.buffer[:15]) == b"\x01\x02\x03" + bytes(6) + b"\x04\x05\x06\x07\x08\0"


@pytest.mark.parametrize("kept", [1, 55, 56, 71, 72, 79])
def test_peer_that_dies_in_the_middle_of_a_frame(make: Make, kept: int) -> None:
    a = make()
    region = a.register(64)
    with link_to(a, streams=2) as (first, second):
        first.sendall(Frame().pack()[:kept])
        second.sendall(message(b"after it", seq=1).pack())
        first.close()
        assert ended(second), "one connection's death ends the link"
    assert not a.poll(0.1)
    assert bytes(region.buffer[8:]) == bytes(56)
    assert a.dropped == 0
    serves(a)


def test_peer_that_dies_between_the_frames_of_a_put(make: Make) -> None:
    a = make()
    a.register(64)
    with link_to(a, streams=2) as (first, _):
        first.sendall(Frame(total=16).pack())
    assert not a.poll(0.2)
    serves(a)


def test_new_link_of_a_peer_ends_its_old_one(make: Make) -> None:
    a = make()
    mine = stranger_address()
    with link_to(a, mine=mine) as (old,), link_to(a, mine=mine) as (new,):
        assert ended(old)
        new.sendall(message(b"new").pack())
        assert [m for _, m in collect(a, messages=1).messages] == [b"new"]


def test_frames_at_random_never_write_outside_of_regions(make: Make) -> None:
    a = make()
    memory = np.zeros(4096, np.uint8)
    a.register(memoryview(memory[1024:2048]))
    draw = random.Random(5)
    near = [0, 1, 8, 1016, 1017, 1024, 1025, 1 << 20, 1 << 32, 1 << 63, BIG - 7, BIG]
    for _ in range(60):
        with link_to(a) as (sock,), contextlib.suppress(ConnectionError):
            for seq in range(20):
                run = draw.choice(near), draw.choice([0, 1, 8, 9, 1024, BIG])
                frame = Frame(
                    kind=draw.choice([PUT, PUT, PUT, MESSAGE, QUERY]),
                    seq=seq if draw.random() < 0.9 else draw.choice(near),
                    total=draw.choice([8, 8, 8, 16, 0, 1 << 21]),
                    region=draw.choice([1, 1, 1, 0, 2]),
                    runs=((0, 8),) if draw.random() < 0.7 else (run,),
                )
                sock.sendall(frame.pack())
    assert not memory[:1024].any()
    assert not memory[2048:].any()
    assert a.dropped > 10
    while a.poll(0.0):
        pass
    serves(a)


# -- receivers that break the rules


@pytest.fixture
def listener() -> Iterator[StrangeListener]:
    with contextlib.closing(StrangeListener()) as strange:
        yield strange


def read_all(sock: socket.socket) -> None:
    while sock.recv(1 << 20):
        continue


def ranges_to(sender: Endpoint, address: str, nbytes: int = 64) -> tuple[Peer, TcpRanges]:
    """A way to a region that nobody has asked the stranger about."""
    peer = sender.connect(address)
    local = Slices(sender.register(nbytes), offsets(0), nbytes)
    remote = Slices(RegionRef(address, "g1", nbytes), offsets(0), nbytes)
    return peer, TcpRanges(peer, local, remote, 1)


@pytest.mark.parametrize(
    "answer",
    [
        b"\0" * 16,
        ANSWER.pack(ANSWER_MAGIC, DONE, 1),
        ANSWER.pack(ANSWER_MAGIC, DONE, BIG),
        ANSWER.pack(ANSWER_MAGIC, 2, 0),
        ANSWER.pack(ANSWER_MAGIC, DONE, 0) * 2,
    ],
)
def test_answers_that_make_no_sense_end_the_link(
    make: Make, listener: StrangeListener, answer: bytes
) -> None:
    a = make(tcp_streams=1)
    peer, ranges = ranges_to(a, listener.address)
    ticket = a.put(ranges, rows((0, 0)), 1)
    listener.first().recv(200)
    listener.first().sendall(answer)
    finish(a, ticket)
    until_refused(lambda: a.send(peer, b"more"))
    serves(a)


BEGUN = 1.0
"""Seconds in which some of a put is on its way, whatever else the machine does."""


def test_deadline_of_a_put_to_a_receiver_that_stalls(make: Make, listener: StrangeListener) -> None:
    """It fails by itself; so does what waits behind it; and the connection is gone."""
    a = make(tcp_streams=2)
    _, ranges = ranges_to(a, listener.address, 64 << 20)
    first = a.put(ranges, rows((0, 0)), 1, timeout=BEGUN)
    second = a.put(ranges, rows((0, 0)), 2, timeout=PATIENCE)
    finish(a, first, second)
    assert isinstance(first.error, DeadlineError)
    assert isinstance(second.error, TransportError)
    assert not isinstance(second.error, DeadlineError)
    with pytest.raises(TransportError, match="deadline"):
        a.put(ranges, rows((0, 0)), 3)
    assert ended(listener.first())
    a.connect(listener.address)
    assert a.put(ranges, rows((0, 0)), 4) is not None


def test_what_a_failed_put_left_in_sockets_is_thrown_away(
    make: Make, listener: StrangeListener
) -> None:
    a = make(tcp_streams=2)
    _, ranges = ranges_to(a, listener.address, 64 << 20)
    ticket = a.put(ranges, rows((0, 0)), 1, timeout=BEGUN)
    finish(a, ticket)
    assert isinstance(ticket.error, DeadlineError)
    for sock in listener.sockets:
        with pytest.raises(ConnectionResetError):
            read_all(sock)  # an orderly end would come after all that was sent


def test_put_that_waits_its_turn_may_expire_alone(make: Make, listener: StrangeListener) -> None:
    a = make(tcp_streams=1)
    _, ranges = ranges_to(a, listener.address, 64 << 20)
    first = a.put(ranges, rows((0, 0)), 1, timeout=PATIENCE)
    second = a.put(ranges, rows((0, 0)), 2, timeout=0.3)
    finish(a, second)
    assert isinstance(second.error, DeadlineError)
    assert not first.done
    sock, left = listener.first(), 64 << 20
    while left > 0:
        left -= len(sock.recv(1 << 20))
    sock.sendall(ANSWER.pack(ANSWER_MAGIC, DONE, 0))
    settle(a, first)


def test_more_puts_than_fit_wait_until_their_deadline(
    make: Make, listener: StrangeListener
) -> None:
    a = make(tcp_streams=1)
    _, ranges = ranges_to(a, listener.address)
    tickets = [a.put(ranges, rows((0, 0)), 0) for _ in range(16384)]
    with pytest.raises(DeadlineError):
        a.put(ranges, rows((0, 0)), 0, timeout=0.2)
    listener.first().sendall(ANSWER.pack(ANSWER_MAGIC, DONE, 0))
    a.put(ranges, rows((0, 0)), 0, timeout=PATIENCE)
    listener.first().close()
    finish(a, *tickets)
    assert [ticket.error is None for ticket in tickets] == [True] + [False] * 16383


def test_peer_that_goes_fails_everything_pending_at_once(
    make: Make, listener: StrangeListener
) -> None:
    a = make(tcp_streams=4)
    _, ranges = ranges_to(a, listener.address, 16 << 20)
    tickets = [a.put(ranges, rows((0, 0)), i) for i in range(5)]
    listener.first().close()
    finish(a, *tickets)
    assert all(isinstance(ticket.error, TransportError) for ticket in tickets)
    serves(a)


def test_receiver_that_does_not_poll_holds_its_sender_up(make: Make) -> None:
    a, b = make("a"), make("b")
    peer = a.connect(b.address())
    text = b"m" * (16 << 20)
    sent: list[int] = []

    def send() -> None:
        for i in range(40):
            a.send(peer, text, timeout=PATIENCE)
            sent.append(i)

    thread = threading.Thread(target=send)
    thread.start()
    until(lambda: len(sent) >= 16)
    time.sleep(0.5)
    assert len(sent) < 30  # 256 MiB unread, 128 MiB on their way
    seen = 0
    while seen < 40:
        for _, m in collect(b, messages=1).messages:
            assert m == text
            seen += 1
    thread.join()


# -- regions


def test_closing_a_region_fences_its_writers(make: Make) -> None:
    a, b = make("a"), make("b")
    memory = np.zeros(64 << 20, np.uint8)
    target = b.register(memoryview(memory))
    source = a.register(64 << 20)
    array(source)[:] = 1
    peer = a.connect(b.address())
    ranges = a.prepare(
        peer, Slices(source, offsets(0), 64 << 20), Slices(target.ref, offsets(0), 64 << 20)
    )
    tickets = [a.put(ranges, rows((0, 0)), i) for i in range(20)]
    first = collect(b, notices=1)
    target.close()
    memory[:] = 0
    finish(a, *tickets)
    assert tickets[0].error is None
    assert "region" in str(tickets[-1].error)
    assert not memory.any()
    a.send(peer, b"the link lives on")
    seen = collect(b, messages=1)
    assert len(first.notices + seen.notices) == sum(ticket.error is None for ticket in tickets)
