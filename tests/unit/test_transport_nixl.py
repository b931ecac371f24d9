"""The nixl transport beyond the contract: absence, exits, stale keys, its control connection."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from tests.transport_kit import PATIENCE, Way, array, collect, rows, until_refused

from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import Peer, Slices, _control, _nixl_agent, missing, nixl
from cloverinfer.transport._control import MESSAGE, NOTICE, Control
from cloverinfer.transport._shared import deadline_after
from cloverinfer.transport.nixl import NixlEndpoint
from cloverinfer.transport.shm import ShmEndpoint

needs_nixl = pytest.mark.skipif(bool(missing("nixl")), reason=missing("nixl"))


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nixl_agent, "PACKAGES", ("no_such_package",))
    assert "pip install" in missing("nixl")
    with pytest.raises(TransportError, match="pip install"):
        NixlEndpoint("a")


# -- the control connection, over shm


def answer(peer: Peer, question: bytes) -> bytes:
    if question == b"refuse":
        raise TransportError("no")
    if question == b"slow":
        time.sleep(0.3)
    return question.upper()


@pytest.fixture
def controls() -> Iterator[tuple[Control, Control]]:
    pair = [Control(ShmEndpoint(name), answer) for name in ("a", "b")]
    yield pair[0], pair[1]
    for control in pair:
        control.close()


def soon() -> float:
    return deadline_after(PATIENCE)


def test_questions_are_answered_though_nobody_polls(controls: tuple[Control, Control]) -> None:
    a, b = controls
    peer = a.connect(b.inner.address(), soon())
    assert a.ask(peer, b"who", soon()) == b"WHO"
    with pytest.raises(TransportError, match="no"):
        a.ask(peer, b"refuse", soon())
    with pytest.raises(DeadlineError):
        a.ask(peer, b"slow", deadline_after(0.05))
    assert a.ask(peer, b"again", soon()) == b"AGAIN"
    assert a.dropped == 1  # the answer that came too late


def test_notices_and_messages_keep_their_order(controls: tuple[Control, Control]) -> None:
    a, b = controls
    peer = a.connect(b.inner.address(), soon())
    for i in range(500):
        a.send(peer, NOTICE, i, b"", soon())
        a.send(peer, MESSAGE, 0, str(i).encode(), soon())
    seen: list[int | bytes] = []
    while len(seen) < 1000:
        seen += [what for _, what in b.take(PATIENCE)]
    assert seen == [what for i in range(500) for what in (i, str(i).encode())]


def test_question_to_one_that_goes_ends_at_once(controls: tuple[Control, Control]) -> None:
    a, b = controls
    peer = a.connect(b.inner.address(), soon())
    closer = threading.Timer(0.1, b.close)
    closer.start()
    error = until_refused(lambda: a.ask(peer, b"are you there", soon()))
    closer.join()
    assert not isinstance(error, DeadlineError)
    with pytest.raises(TransportError):
        a.connect(b.inner.address(), soon())


def test_nonsense_is_dropped_and_counted(controls: tuple[Control, Control]) -> None:
    a, b = controls
    peer = a.connect(b.inner.address(), soon())
    for record in (b"", b"\x01", b"\xff\0\0\0\0", _control._HEADER.pack(_control._ANSWER, 77)):
        a.inner.send(peer, record)
    a.send(peer, MESSAGE, 0, b"sense", soon())
    assert [what for _, what in b.take(PATIENCE)] == [b"sense"]
    assert b.dropped == 4


def test_reading_stops_while_too_much_is_unread(
    controls: tuple[Control, Control], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_control, "_MOST_UNREAD", 10)
    a, b = controls
    peer = a.connect(b.inner.address(), soon())
    filler = bytes(60_000)
    error = until_refused(lambda: a.send(peer, MESSAGE, 0, filler, deadline_after(0.2)))
    assert isinstance(error, DeadlineError)
    assert b._arrived.qsize() < 100


# -- with NIXL


@pytest.fixture
def pair() -> Iterator[tuple[NixlEndpoint, NixlEndpoint]]:
    a, b = NixlEndpoint("a"), NixlEndpoint("b")
    yield a, b
    a.close()
    b.close()


EXIT = """
import sys
from tests.transport_kit import Way, collect
from cloverinfer.transport import create_endpoint
a, b = create_endpoint("nixl", "a"), create_endpoint("nixl", "b")
way = Way(a, b, nbytes=1 << 20)
way.put(1)
collect(b, notices=1)
if sys.argv[1] == "closed":
    b.close()
    a.close()
if sys.argv[1] == "raised":
    raise SystemExit(7)
"""


@needs_nixl
@pytest.mark.parametrize(("how", "status"), [("closed", 0), ("left open", 0), ("raised", 7)])
def test_process_ends_well(how: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", EXIT, how], timeout=60, capture_output=True)
    assert (done.returncode, done.stderr) == (status, b"")


@needs_nixl
def test_idle_agents_do_not_use_the_processor(pair: tuple[NixlEndpoint, NixlEndpoint]) -> None:
    before = time.process_time()
    assert not pair[0].poll(1.0)
    assert time.process_time() - before < 0.5


@needs_nixl
def test_region_is_fenced_before_it_is_given_back(
    pair: tuple[NixlEndpoint, NixlEndpoint],
) -> None:
    way = Way(*pair, nbytes=4096)
    way.put(1)
    memory = array(way.target)
    peer = way.peer
    assert isinstance(peer, nixl.NixlPeer)
    with peer.lock:  # as if a put were being written
        closing = threading.Thread(target=way.target.close)
        closing.start()
        closing.join(0.3)
        assert closing.is_alive()
    closing.join(PATIENCE)
    with pytest.raises(TransportError, match="closed"):
        pair[0].put(way.ranges, rows((0, 0)), 2)
    assert not memory.any()


@needs_nixl
def test_region_that_is_granted_while_it_closes_is_fenced(
    pair: tuple[NixlEndpoint, NixlEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair
    source, target = a.register(4096), b.register(4096)
    metadata, closing = b._agent.metadata, threading.Thread(target=target.close)

    def slowly(key: int) -> bytes:
        closing.start()
        closing.join(0.3)
        return metadata(key)

    monkeypatch.setattr(b._agent, "metadata", slowly)
    whole = np.zeros(1, np.int64)
    local, remote = Slices(source, whole, 4096), Slices(target.ref, whole, 4096)
    ranges = a.prepare(a.connect(b.address()), local, remote)
    closing.join(PATIENCE)
    with pytest.raises(TransportError, match="closed"):
        a.put(ranges, rows((0, 0)), 1)


@needs_nixl
def test_keys_that_are_forgotten_are_loaded_again(
    pair: tuple[NixlEndpoint, NixlEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "_MOST_STALE", 3)
    kept = Way(*pair, nbytes=4096)
    for i in range(10):
        array(kept.source)[:] = i + 1
        other = Way(*pair, nbytes=4096 * (i + 1))
        other.put(i)
        kept.put(100 + i)
        collect(pair[1], notices=2)
        kept.expect(np.full(4096, i + 1, np.uint8))
        other.target.close()
        other.source.close()
    assert isinstance(kept.peer, nixl.NixlPeer)
    assert kept.peer.loads >= 3


@needs_nixl
def test_write_that_stale_keys_spoil_is_tried_again(
    pair: tuple[NixlEndpoint, NixlEndpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    way, gone = Way(*pair, nbytes=4096), Way(*pair, nbytes=4096)
    gone.put(1)
    gone.target.close()
    load, failed = pair[0]._agent.load, []

    def fail_once(metadata: bytes) -> str:
        if not failed:
            failed.append(metadata)
            raise TransportError("these keys are others than before")
        return load(metadata)

    monkeypatch.setattr(pair[0]._agent, "load", fail_once)
    array(way.source)[:] = 5
    way.put(2)
    way.expect(np.full(4096, 5, np.uint8))
    assert failed
