"""The cuda_ipc transport between two processes on a device: bytes, deaths, the next peer."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.cuda_child import NBYTES
from tests.cuda_kit import RealDriver
from tests.transport_kit import PATIENCE, collect, finish, offsets, rows, segments, until_refused

from cloverinfer.core.errors import DeadlineError
from cloverinfer.transport import Peer, Ranges, RegionRef, Slices, missing
from cloverinfer.transport._shm_files import remove_leftovers, start_time
from cloverinfer.transport.cuda_ipc import CudaIpcEndpoint

pytestmark = pytest.mark.skipif(bool(missing("cuda_ipc")), reason=missing("cuda_ipc"))
ROOT = Path(__file__).parents[2]


class Ours:
    """This process's endpoint, with a device region and one for answers, and its children."""

    def __init__(self) -> None:
        self.driver = RealDriver()
        self.endpoint = CudaIpcEndpoint("ours", driver=self.driver)
        self.memory = self.driver.allocate(NBYTES)
        self.region = self.endpoint.register(self.memory)
        self.answers = self.driver.allocate(NBYTES)
        self.answer = self.endpoint.register(self.answers)
        self.children: list[subprocess.Popen[bytes]] = []

    def meet(self, role: str) -> tuple[subprocess.Popen[bytes], Peer, RegionRef]:
        command = [sys.executable, "-m", "tests.cuda_child", role, self.endpoint.address()]
        child = subprocess.Popen(command, cwd=ROOT)
        self.children.append(child)
        while True:  # what a dead predecessor has sent may come first
            for peer, message in collect(self.endpoint, messages=1).messages:
                if message.startswith(b"region "):
                    self.endpoint.send(peer, msgspec.msgpack.encode(self.answer.ref))
                    return child, peer, msgspec.msgpack.decode(message[7:], type=RegionRef)

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        child.send_signal(signal.SIGKILL)
        end = time.monotonic() + PATIENCE
        while start_time(child.pid) is not None:
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.fixture
def ours() -> Iterator[Ours]:
    made = Ours()
    yield made
    made.endpoint.close()
    for child in made.children:
        child.kill()
        child.wait()
        remove_leftovers(child.pid)
    assert segments() == []


def whole(ours: Ours, peer: Peer, ref: RegionRef) -> Ranges:
    here, there = (Slices(region, offsets(0), NBYTES) for region in (ours.region, ref))
    return ours.endpoint.prepare(peer, here, there)


def test_bytes_go_there_and_back(ours: Ours) -> None:
    child, peer, ref = ours.meet("echo")
    ranges = whole(ours, peer, ref)
    for round_ in range(0, 20, 2):
        data = np.random.default_rng(round_).integers(0, 256, NBYTES, np.uint8)
        ours.driver.write(ours.memory.pointer, data)
        ticket = ours.endpoint.put(ranges, rows((0, 0)), round_)
        finish(ours.endpoint, ticket)
        assert collect(ours.endpoint, notices=1).notices == [(peer, round_ + 1)]
        np.testing.assert_array_equal(ours.driver.read(ours.answers.pointer, NBYTES), data)
    ours.endpoint.send(peer, b"end")
    assert child.wait(PATIENCE) == 0


def test_receiver_that_is_killed_is_an_error_and_the_next_is_served(ours: Ours) -> None:
    child, peer, ref = ours.meet("echo")
    ranges = whole(ours, peer, ref)
    tickets = [ours.endpoint.put(ranges, rows((0, 0)), 1) for _ in range(20)]
    ours.kill(child)
    error = until_refused(lambda: tickets.append(ours.endpoint.put(ranges, rows((0, 0)), 1)))
    assert not isinstance(error, DeadlineError)
    finish(ours.endpoint, *tickets)
    successor, peer, ref = ours.meet("echo")
    finish(ours.endpoint, ours.endpoint.put(whole(ours, peer, ref), rows((0, 0)), 100))
    while True:
        if (peer, 101) in collect(ours.endpoint, notices=1).notices:
            break
    assert len(ours.endpoint._targets) == 1
    ours.endpoint.send(peer, b"end")
    assert successor.wait(PATIENCE) == 0


def test_sender_that_is_killed_with_copies_waiting_writes_nothing(ours: Ours) -> None:
    child, peer, _ = ours.meet("stall")
    ours.driver.write(ours.answers.pointer, np.full(NBYTES, 3, np.uint8))
    assert not ours.endpoint.poll(1.0).notices  # b"stalled" waits behind the notice
    ours.kill(child)
    seen = collect(ours.endpoint, messages=1)
    assert (seen.notices, seen.messages) == ([], [(peer, b"stalled")])
    assert ours.endpoint.dropped == 1
    assert (ours.driver.read(ours.answers.pointer, NBYTES) == 3).all()
