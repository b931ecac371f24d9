"""The other process of the transport suites: ``python -m tests.transport_partner ADDRESS NBYTES``.

It meets the endpoint at ADDRESS, where both register NBYTES, and does what messages say:

echo TEXT       sends the message back
mirror NOTICE   puts its whole region into the other side's
stream COUNT    puts slot after slot, each filled with its number, with as many ahead as there are
                slots; every further message gives it one more
both COUNT      puts COUNT notices while as many come in, then says so
flood           puts its whole region for ever
end             ends
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint, Events, Peer, Ranges, RegionRef, Slices, create_endpoint
from cloverinfer.transport._shm_files import start_time
from tests.transport_kit import (
    PATIENCE,
    array,
    collect,
    offsets,
    remember,
    rows,
    settle,
)

SLOTS = 16
BOTH = 1 << 20
"""First notice of ``both``, which tells its own from those of tests before."""


class Met:
    """One side of a meeting: the peer, our region, and ways between the two regions."""

    def __init__(self, endpoint: Endpoint, peer: Peer, nbytes: int, ref: RegionRef) -> None:
        self.endpoint, self.peer, self.nbytes, self.ref = endpoint, peer, nbytes, ref
        self.region = endpoint.register(nbytes)

    def prepare(self, at: np.ndarray, length: int) -> Ranges:
        return self.endpoint.prepare(
            self.peer, Slices(self.region, at, length), Slices(self.ref, at, length)
        )

    def whole(self) -> Ranges:
        return self.prepare(offsets(0), self.nbytes)

    def slots(self) -> Ranges:
        length = self.nbytes // SLOTS
        return self.prepare(np.arange(SLOTS, dtype=np.int64) * length, length)

    def send(self, text: str) -> None:
        self.endpoint.send(self.peer, text.encode())

    def both(self, count: int) -> None:
        """Puts while puts come; every one of both must arrive."""
        ranges = self.prepare(offsets(0), 64)
        numbers = range(BOTH, BOTH + count)
        tickets = [self.endpoint.put(ranges, rows((0, 0)), number) for number in numbers]
        settle(self.endpoint, *tickets)
        came: list[int] = []
        messages = []
        while len(came) < count:
            seen = collect(self.endpoint, notices=1)
            came += [notice for _, notice in seen.notices if notice >= BOTH]
            messages += seen.messages
        assert came == list(numbers)
        remember(self.endpoint, Events(messages=messages))


Start = Callable[..., "Partner"]
"""``start(nbytes, port=0)``: the next partner of our endpoint, ended with the test."""


class Partner:
    """The partner's process as the test sees it."""

    def __init__(self, ours: Endpoint, nbytes: int, port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.transport_partner"]
        command += [ours.address(), str(nbytes), str(port)]
        self.process = subprocess.Popen(command, cwd=Path(__file__).parents[1])
        try:
            peer, ref = self._hello(ours)
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        self.met = Met(ours, peer, nbytes, ref)
        ours.send(peer, msgspec.msgpack.encode(self.met.region.ref))

    def _hello(self, ours: Endpoint) -> tuple[Peer, RegionRef]:
        while True:  # what a dead predecessor has sent may come first
            for peer, message in collect(ours, messages=1).messages:
                if message.startswith(b"hello "):
                    return peer, msgspec.msgpack.decode(message[6:], type=RegionRef)

    def kill(self) -> None:
        """Without waiting for it: a zombie is dead too."""
        self.process.kill()
        end = time.monotonic() + PATIENCE
        while start_time(self.process.pid) is not None:
            assert time.monotonic() < end
            time.sleep(0.01)

    def end(self) -> int:
        self.met.send("end")
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()


def answers(partner: Partner) -> None:
    """It echoes, and what is put into it comes back whole."""
    met = partner.met
    met.send("echo hello")
    assert collect(met.endpoint, messages=1).messages == [(met.peer, b"hello")]
    mine = array(met.region)
    mine[:] = want = np.random.default_rng(met.nbytes).integers(0, 256, met.nbytes, np.uint8)
    settle(met.endpoint, met.endpoint.put(met.whole(), rows((0, 0)), 1))
    mine[:] = 0
    met.send("mirror 5")
    assert collect(met.endpoint, notices=1).notices == [(met.peer, 5)]
    assert np.array_equal(mine, want)


def main(address: str, nbytes: str, port: str) -> None:
    transport = address.partition("://")[0]
    if transport == "ray":
        import ray

        ray.init(log_to_driver=False)  # where RAY_ADDRESS says
    endpoint = create_endpoint(transport, "partner", NetworkConfig(port=int(port)))
    try:
        serve(endpoint, address, int(nbytes))
    finally:
        endpoint.close()


def serve(endpoint: Endpoint, address: str, nbytes: int) -> None:
    met = Met(endpoint, endpoint.connect(address), nbytes, RegionRef("", "", 0))
    endpoint.send(met.peer, b"hello " + msgspec.msgpack.encode(met.region.ref))
    met.ref = msgspec.msgpack.decode(next_message(endpoint), type=RegionRef)
    while True:
        verb, _, argument = next_message(endpoint).decode().partition(" ")
        if verb == "end":
            return
        VERBS[verb](met, argument)


def next_message(endpoint: Endpoint) -> bytes:
    seen = collect(endpoint, messages=1)
    (_, message), *others = seen.messages
    remember(endpoint, Events(seen.notices, others))
    return message


def echo(met: Met, text: str) -> None:
    met.send(text)


def mirror(met: Met, notice: str) -> None:
    settle(met.endpoint, met.endpoint.put(met.whole(), rows((0, 0)), int(notice)))


def stream(met: Met, count: str) -> None:
    ranges, length = met.slots(), met.nbytes // SLOTS
    for i in range(int(count)):
        if i >= SLOTS:
            next_message(met.endpoint)
        slot = i % SLOTS
        array(met.region)[slot * length : (slot + 1) * length] = i % 255 + 1
        settle(met.endpoint, met.endpoint.put(ranges, rows((slot, slot)), i))


def both(met: Met, count: str) -> None:
    met.both(int(count))
    met.send("all came")


def flood(met: Met, _: str) -> None:
    ranges = met.whole()
    notice = 0
    while True:
        settle(met.endpoint, met.endpoint.put(ranges, rows((0, 0)), notice))
        notice += 1


VERBS: dict[str, Callable[[Met, str], None]] = {
    "echo": echo,
    "mirror": mirror,
    "stream": stream,
    "both": both,
    "flood": flood,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
