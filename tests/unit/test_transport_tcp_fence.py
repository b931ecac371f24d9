"""Peers of a tcp endpoint that are fenced: what they left in its sockets is never written."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from tests.tcp_stranger import (
    HEADER,
    Frame,
    Make,
    ended,
    endpoints,
    link_to,
    message,
    serves,
    stranger_address,
    until,
)
from tests.transport_kit import PATIENCE, array, collect

from cloverinfer.core.errors import DeadlineError, TransportError

FULL = 1 << 20
"""Notices in its inbox at which an endpoint stops to read."""


@pytest.fixture
def make() -> Iterator[Make]:
    with endpoints() as create:
        yield create


def empty_puts(count: int) -> bytes:
    head = np.frombuffer(Frame(total=0, nbytes=0, runs=(), payload=b"").pack(), np.uint8)
    assert len(head) == HEADER.size
    heads = np.tile(head, (count, 1))
    heads[:, 8:16] = np.arange(count, dtype="<u8")[:, None].view(np.uint8)
    return heads.tobytes()


def stall(sock: socket.socket) -> None:
    """Has the endpoint read no further, with a put of eight bytes that it has not read behind."""
    count = FULL + 1000  # what is read ahead has no bytes to write
    sock.sendall(empty_puts(count))
    sock.sendall(Frame(seq=count).pack())


def test_bytes_that_were_not_read_when_their_writer_was_fenced_never_land(make: Make) -> None:
    a = make()
    region = a.register(64)
    mine = stranger_address()
    with link_to(a, mine=mine) as (sock,):
        stall(sock)
        a.fence(mine, PATIENCE)
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            a.poll(0.05)  # which would have it read on
        assert not array(region).any()
        assert ended(sock)
    with link_to(a, mine=mine) as (sock,):
        sock.sendall(Frame().pack())
        collect(a, notices=1)
    assert array(region)[:8].all()
    serves(a)


def flood(sock: socket.socket) -> None:
    """Puts a MiB again and again until the link ends."""
    frame = Frame(total=FULL, nbytes=FULL, runs=((0, FULL),), payload=b"\xff" * FULL)
    with contextlib.suppress(ConnectionError):
        for seq in range(1 << 20):
            sock.sendall(replace(frame, seq=seq).pack())


@pytest.mark.parametrize("how", ["fence", "connect"])
def test_nothing_is_written_once_the_fence_stands(make: Make, how: str) -> None:
    """Also where a thread was writing just then, be it for a new link of the same peer."""
    a = make()
    region = a.register(FULL)
    mine = stranger_address()
    for _ in range(20):
        with link_to(a, mine=mine) as (sock,), contextlib.ExitStack() as stack:
            writer = threading.Thread(target=flood, args=(sock,))
            writer.start()
            while not array(region).any():
                time.sleep(0.001)
            if how == "fence":
                a.fence(mine, PATIENCE)
            else:
                stack.enter_context(link_to(a, mine=mine))
            array(region)[:] = 0
            time.sleep(0.005)
            landed = array(region).any()
            writer.join(PATIENCE)
            assert not landed
        a.poll(0.0)


@pytest.mark.parametrize("known", [False, True])
def test_a_link_that_is_on_its_way_in_is_fenced_too(
    make: Make, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Its end was told that it is welcome, or even the engine has it, but not yet the endpoint."""
    a = make()
    region = a.register(FULL)
    mine = stranger_address()
    reached, on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert on.wait(PATIENCE)

    add, adopt = a._add_incoming, a._acceptor._adopt
    if known:
        monkeypatch.setattr(a, "_add_incoming", lambda *which: (add(*which), wait())[0])
    else:
        monkeypatch.setattr(a._acceptor, "_adopt", lambda *which: (wait(), adopt(*which))[1])
    with link_to(a, mine=mine) as (sock,):
        writer = threading.Thread(target=flood, args=(sock,))
        writer.start()
        assert reached.wait(PATIENCE)
        until(lambda: not known or bool(array(region).any()))
        fencing = threading.Thread(target=a.fence, args=(mine, PATIENCE))
        fencing.start()
        fencing.join(0.05)  # what is held back here may be what it has to wait for
        on.set()
        fencing.join(PATIENCE)
        array(region)[:] = 0
        writer.join(PATIENCE)
        assert not writer.is_alive()
        assert not array(region).any()
    serves(a)


def test_strangers_and_those_who_left_are_fenced_at_once(make: Make) -> None:
    a = make()
    a.fence(stranger_address(), 0.0)
    mine = stranger_address()
    with link_to(a, mine=mine) as (sock,):
        sock.sendall(message(b"whole").pack())
        collect(a, messages=1)
    while a._incoming:
        a.poll(0.05)
    a.fence(mine, 0.0)


class Stuck:
    """An engine whose threads do not come back."""

    def __init__(self, engine: object) -> None:
        self._engine = engine

    def fence_incoming(self, link: int, timeout: float) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


def test_a_link_that_does_not_end_is_told_and_lets_no_other_in(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = make()
    mine = stranger_address()
    with link_to(a, mine=mine):
        until(lambda: bool(a._incoming))
        monkeypatch.setattr(a, "_engine", Stuck(a._engine))
        with pytest.raises(DeadlineError, match="has not ended"):
            a.fence(mine, 0.0)
        with pytest.raises(TransportError), link_to(a, mine=mine):
            pass
        monkeypatch.undo()
