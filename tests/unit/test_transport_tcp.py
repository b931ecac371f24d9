"""What only the tcp transport can do wrong: addresses, strangers at its port, growth."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from tests.tcp_stranger import (
    Make,
    ended,
    endpoints,
    serves,
    stranger_address,
    until,
)
from tests.transport_kit import (
    PATIENCE,
    Way,
    array,
    collect,
    put_error,
    rows,
    until_refused,
)

from cloverinfer.config.network import NetworkConfig
from cloverinfer.core.errors import TransportError
from cloverinfer.transport import _tcp_accept
from cloverinfer.transport._tcp_address import TcpAddress
from cloverinfer.transport._tcp_meet import (
    CHALLENGE_BYTES,
    DIALLER,
    HELLO_BYTES,
    VERSION,
    Hello,
    Secret,
)
from cloverinfer.transport.tcp import TcpEndpoint


@pytest.fixture
def make() -> Iterator[Make]:
    with endpoints() as create:
        yield create


# -- addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_addresses_of_both_families_lead_there(make: Make, host: str) -> None:
    a, b = make("a", bind_host=host), make("b", bind_host=host)
    where = TcpAddress.parse(a.address())
    assert where.host == host
    assert where.port > 0
    assert str(where) == a.address()
    way = Way(b, a, nbytes=1 << 20)
    way.put(1)
    collect(a, notices=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_advertised_as_one_that_can_be_reached(make: Make, host: str) -> None:
    a = make("a", bind_host=host)
    assert TcpAddress.parse(a.address()).host != host
    serves(a)


def test_advertised_host_is_told_as_it_is(make: Make) -> None:
    a = make("a", advertise_host="localhost")
    assert a.address().startswith("tcp://localhost:")
    serves(a)


def test_configured_port_is_the_first_that_is_tried(make: Make) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port < TcpAddress.parse(make("a", port=port).address()).port < port + 64


def test_host_that_is_not_ours_is_refused(make: Make) -> None:
    with pytest.raises(TransportError, match=r"network\.bind_host '192\.0\.2\.1'"):
        make("a", bind_host="192.0.2.1")


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:1",
        "tcp://127.0.0.1:99999999/0123456789abcdef",
        "tcp:///0123456789abcdef",
        "shm://x",
        "tcp://" + "h" * 300 + ":1/0123456789abcdef",
    ],
)
def test_what_is_no_address_is_refused(make: Make, address: str) -> None:
    with pytest.raises(TransportError, match="not the address"):
        make().connect(address)


# -- strangers at the port


def knock(endpoint: TcpEndpoint) -> socket.socket:
    where = TcpAddress.parse(endpoint.address())
    return socket.create_connection((where.host, where.port), timeout=PATIENCE)


def hello(endpoint: TcpEndpoint, **fields: object) -> bytes:
    wanted = TcpAddress.parse(endpoint.address()).incarnation
    first = Hello(VERSION, 0, 1, b"l" * 16, wanted, b"n" * 32, stranger_address())
    return replace(first, **fields).pack()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n" * 100, bytes(HELLO_BYTES), b"\xff" * 100_000]
)
def test_garbage_is_dropped_and_counted(make: Make, garbage: bytes) -> None:
    a = make()
    with knock(a) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
        assert ended(sock)
    assert a.dropped == 1
    assert not a.poll(0.0)
    serves(a)


def test_connections_that_end_early_are_counted(make: Make) -> None:
    a = make()
    for part in (b"", b"C", hello(a)[:-1], hello(a)):
        with knock(a) as sock:
            sock.sendall(part)
    until(lambda: a.dropped == 4)
    serves(a)


def test_contradicting_hellos_are_dropped(make: Make) -> None:
    a = make()
    for bad in ({"stream": 1}, {"streams": 65}, {"streams": 0}, {"address": "tcp://nowhere"}):
        with knock(a) as sock:
            sock.sendall(hello(a, **bad))
            assert ended(sock)
    assert a.dropped == 4


@pytest.mark.parametrize("theirs", ["another", None])
def test_peers_with_another_secret_do_not_meet(make: Make, theirs: str | None) -> None:
    a, b = make("a", secret="ours"), make("b", secret=theirs)
    with pytest.raises(TransportError, match=r"network\.secret"):
        b.connect(a.address())
    with pytest.raises(TransportError, match=r"network\.secret"):
        a.connect(b.address())
    until(lambda: a.dropped == b.dropped == 1)
    serves(a, "ours")


def test_dialler_that_does_not_care_about_our_proof_must_still_prove(make: Make) -> None:
    a = make(secret="ours")
    with knock(a) as sock:
        said = hello(a)
        sock.sendall(said)
        nonce = sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)[16:48]
        sock.sendall(Secret("guess").proof(DIALLER, said, nonce))
        assert ended(sock)
    assert a.dropped == 1


def test_recorded_handshake_is_of_no_use(make: Make) -> None:
    a = make(secret="ours")
    said = hello(a)
    with knock(a) as sock:
        sock.sendall(said)
        nonce = sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)[16:48]
        proof = Secret("ours").proof(DIALLER, said, nonce)
        sock.sendall(proof)
        assert len(sock.recv(12, socket.MSG_WAITALL)) == 12
        assert a.dropped == 0
    with knock(a) as sock:
        sock.sendall(said)
        sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(proof)
        assert ended(sock)
    assert a.dropped == 1


def test_proof_of_the_listener_cannot_be_reflected(make: Make) -> None:
    a = make(secret="ours")
    with knock(a) as sock:
        sock.sendall(hello(a))
        challenge = sock.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        sock.sendall(challenge[48:80])
        assert ended(sock)
    assert a.dropped == 1


def test_other_version_is_told_so(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = make("a"), make("b")
    monkeypatch.setattr("cloverinfer.transport._tcp_meet.VERSION", VERSION + 1)
    with pytest.raises(TransportError, match="version"):
        b.connect(a.address())
    until(lambda: a.dropped == 1)


def test_restart_on_the_same_port_is_another_endpoint(make: Make) -> None:
    a, old = make("a"), make("old")
    way = Way(a, old, nbytes=64)
    where = TcpAddress.parse(old.address())
    old.close()
    new = make("new", port=where.port)
    assert TcpAddress.parse(new.address()).port == where.port
    target = new.register(64)
    assert target.ref.name == way.target.ref.name
    with pytest.raises(TransportError, match="restarted"):
        a.connect(str(where))
    array(way.source)[:] = 1
    assert put_error(a, way.ranges, rows((0, 0))) is not None
    assert not array(target).any()
    serves(new)


def test_silent_and_slow_connections_make_way(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tcp_accept, "PROVE_WITHIN", 0.5)
    a = make()
    with knock(a) as silent, knock(a) as slow:
        stop = threading.Event()

        def drip() -> None:
            for byte in hello(a):
                with contextlib.suppress(OSError):
                    slow.send(bytes([byte]))
                if stop.wait(0.02):
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        assert ended(silent)
        assert ended(slow)
        stop.set()
        thread.join()
    assert a.dropped == 2


def test_the_oldest_of_many_strangers_makes_way(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_tcp_accept, "MOST_UNPROVEN", 8)
    a = make()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(knock(a)) for _ in range(40)]
        serves(a)
        assert ended(strangers[0])
        assert 32 <= a.dropped <= 40


def test_dialler_that_had_to_make_way_comes_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, answer = make(), _tcp_accept.Acceptor._answer
    crowd = [1, 1]

    def crowded(self: _tcp_accept.Acceptor, guest: _tcp_accept._Guest) -> None:
        if crowd:
            crowd.pop()
            raise TransportError("too many others came after it")
        answer(self, guest)

    monkeypatch.setattr(_tcp_accept.Acceptor, "_answer", crowded)
    serves(a)
    assert a.dropped == 2


# -- growth


def test_connecting_in_a_loop_leaves_nothing_behind(make: Make) -> None:
    a = make("a")

    def once() -> tuple[int, int]:
        with contextlib.closing(TcpEndpoint("b", NetworkConfig())) as b:
            way, back = Way(a, b, nbytes=4096), Way(b, a, nbytes=4096)
            way.put(1)
            back.put(2)
            collect(a, notices=1)
            collect(b, notices=1)
            for region in (way.source, back.target):
                region.close()
        until_refused(lambda: a.send(way.peer, b"?"))
        a.poll(0.02)
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before = [once() for _ in range(3)][-1]
    for _ in range(20):
        once()
    end = time.monotonic() + PATIENCE
    while once() != before:
        assert time.monotonic() < end
    assert len(a._incoming) <= 1
    assert a._pending == {}


def test_closed_endpoint_has_no_threads_or_files_left() -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    before = counts()
    a, b = TcpEndpoint("a"), TcpEndpoint("b")
    Way(a, b, nbytes=64).put(1)
    assert counts() > before
    a.close()
    b.close()
    # A thread that was joined may stand in /proc a moment longer, then and before.
    until(lambda: all(now <= was for now, was in zip(counts(), before, strict=True)))
