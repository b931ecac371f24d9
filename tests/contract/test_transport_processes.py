"""What every transport between processes must do: real processes, death, restarts, strangers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.transport_kit import (
    PATIENCE,
    Wire,
    array,
    collect,
    put_error,
    rows,
    segments,
    settle,
    until_refused,
    wire_params,
)
from tests.transport_partner import SLOTS, Partner, Start, answers

from cloverinfer.core.errors import DeadlineError, TransportError
from cloverinfer.transport import create_endpoint

NBYTES = 1 << 20


@pytest.fixture(params=wire_params(lambda wire: wire.processes), scope="module")
def wire(request: pytest.FixtureRequest, ready: Callable[[Wire], Wire]) -> Wire:
    return ready(request.param)


@pytest.fixture(scope="module")
def partner(wire: Wire) -> Iterator[Partner]:
    """One for all tests that leave it alive."""
    ours = create_endpoint(wire.name, "ours")
    partner = Partner(ours, NBYTES)
    yield partner
    assert partner.end() == 0
    ours.close()
    assert segments() == []


# -- side by side


def test_what_goes_over_comes_back(partner: Partner) -> None:
    answers(partner)


@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 4_000_000])
def test_messages_between_processes(partner: Partner, nbytes: int) -> None:
    partner.met.send("echo " + "y" * nbytes)
    ((_, message),) = collect(partner.met.endpoint, messages=1).messages
    assert message == b"y" * nbytes


def test_data_of_another_process_is_there_before_its_notice(wire: Wire, partner: Partner) -> None:
    met, count, length = partner.met, wire.count(2000), NBYTES // SLOTS
    met.send(f"stream {count}")
    seen = 0
    while seen < count:
        for _, notice in collect(met.endpoint, notices=1).notices:
            assert notice == seen
            slot = notice % SLOTS
            piece = array(met.region)[slot * length : (slot + 1) * length]
            assert (piece == notice % 255 + 1).all()
            seen += 1
            if notice + SLOTS < count:
                met.send("more")
    answers(partner)


def test_many_small_unaligned_puts_in_flight(wire: Wire, partner: Partner) -> None:
    met, count, length = partner.met, wire.count(10_000), 61
    draw = np.random.default_rng(3)
    mine = array(met.region)
    mine[:] = draw.integers(0, 256, NBYTES, np.uint8)
    want = np.zeros(NBYTES, np.uint8)
    at = np.arange(count, dtype=np.int64) * (length + 2) + 1
    ranges = met.prepare(at, length)
    settle(met.endpoint, met.endpoint.put(met.whole(), rows((0, 0)), 0))
    want[:] = mine
    mine[:] = draw.integers(0, 256, NBYTES, np.uint8)
    tickets = [met.endpoint.put(ranges, rows((i, i)), i) for i in range(count)]
    for begin in at:
        want[begin : begin + length] = mine[begin : begin + length]
    settle(met.endpoint, *tickets)
    met.send("mirror 9")
    collect(met.endpoint, notices=1)
    assert np.array_equal(mine, want)


def test_both_processes_put_at_once(wire: Wire, partner: Partner) -> None:
    count = wire.count(3000)
    partner.met.send(f"both {count}")
    partner.met.both(count)
    messages = collect(partner.met.endpoint, messages=1).messages
    assert messages == [(partner.met.peer, b"all came")]


# -- death


def big(wire: Wire) -> int:
    return min(wire.most, (64 << 20) // wire.pace + NBYTES)


def test_receiver_killed_in_the_middle_of_a_put(wire: Wire, start: Start) -> None:
    partner = start(big(wire))
    met = partner.met
    ranges = met.whole()
    killer = threading.Timer(0.2, partner.kill)
    killer.start()
    begun, error = time.monotonic(), None
    while error is None:
        error = put_error(met.endpoint, ranges, rows((0, 0)), timeout=PATIENCE)
        assert time.monotonic() - begun < PATIENCE
    killer.join()
    # Its end was seen; the time was not over.
    assert not isinstance(error, DeadlineError)
    until_refused(lambda: met.send("anyone?"))
    with pytest.raises(TransportError):
        met.endpoint.connect(met.peer.address, timeout=5.0)
    answers(start(NBYTES))


def test_sender_killed_in_the_middle_of_a_put(wire: Wire, start: Start) -> None:
    partner = start(big(wire))
    met = partner.met
    met.send("flood")
    notices = collect(met.endpoint, notices=3).notices
    partner.kill()
    while seen := met.endpoint.poll(0.2):
        notices += seen.notices
    assert [notice for _, notice in notices] == list(range(len(notices)))
    met.region.close()
    answers(start(NBYTES))
