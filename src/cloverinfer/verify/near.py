"""The near side of a check: moves patterns over a transport and times it, with a far side's
help."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ..transport import Endpoint, Peer, create_endpoint
from .messages import ACK, LATENCY_BYTES, Answer, Ask, pattern
from .sides import STEP, Control, Data


@dataclass(frozen=True)
class Latency:
    """Seconds of half a round trip of a put of 4 KB with its notice."""

    least: float
    median: float
    p99: float


class Near:
    """Asks, and hears answers."""

    def __init__(self, control: Control, pid: int | None = None) -> None:
        self.control = control
        self.pid = pid
        """Of the far side, where it is a process of this host that we started."""

    def ask(self, ask: Ask) -> Answer:
        """``TransportError`` where the far side could not, or is gone."""
        self.control.say(ask)
        return self.answer()

    def answer(self) -> Answer:
        answer = self.control.hear(Answer)
        if answer.error:
            raise TransportError(f"the other side: {answer.error}")
        return answer

    def start_over(self) -> None:
        """After a failure: what the far side still says of it is passed over, and what it has open
        is closed. ``TransportError`` if the far side does not come to that."""
        self.control.say(Ask("close"))
        while not self.control.hear(Answer).closed:
            continue


class Exchange:
    """One transport open on both sides, with a region of ``nbytes`` on each. ``gpus``: those whose
    memory the regions are, near and far; None: the hosts'."""

    def __init__(
        self,
        near: Near,
        transport: str,
        network: NetworkConfig,
        nbytes: int,
        gpus: tuple[int, int] | None = None,
    ) -> None:
        self._near, self.nbytes = near, nbytes
        ours, theirs = gpus or (None, None)
        far = near.ask(Ask("open", transport=transport, nbytes=nbytes, device=theirs))
        assert far.region is not None
        endpoint = create_endpoint(transport, "verify-near", network)
        try:
            self._data = Data(endpoint, nbytes, near.control, ours)
        except BaseException:
            endpoint.close()
            raise
        try:
            self._data.meet(far.address, far.region)
            mine = self._data.region.ref
            near.ask(Ask("meet", address=endpoint.address(), region=mine))
        except BaseException:
            self._data.close()
            raise

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._data.close()
        if kind is None:  # else the far side may be busy, or gone
            self._near.ask(Ask("close"))

    def moved(self, nbytes: int, length: int) -> int:
        """Moves patterns both ways in scattered pieces; how many bytes came wrong."""
        data, near = self._data, self._near
        data.memory.write(pattern(nbytes, 1))
        data.settle(data.put(*data.way(nbytes, length), 1))
        wrong = near.ask(Ask("check", nbytes=nbytes, seed=1)).wrong
        near.ask(Ask("fill", nbytes=nbytes, length=length, seed=2))
        data.notice()
        return wrong + data.memory.wrong(pattern(nbytes, 2))

    def latency(self, rounds: int) -> Latency:
        """Of ``rounds`` round trips; some before them do not count."""
        warm = max(rounds // 10, 1)
        data = self._data
        ranges, index = data.way(LATENCY_BYTES, LATENCY_BYTES)
        self._near.control.say(Ask("echo", count=warm + rounds))
        times = []
        for i in range(warm + rounds):
            begun = time.perf_counter()
            ticket = data.put(ranges, index, i)
            data.notice()
            times.append((time.perf_counter() - begun) / 2)
            data.settle(ticket)
        self._near.answer()
        times = sorted(times[warm:])
        return Latency(times[0], statistics.median(times), times[int(len(times) * 0.99)])

    def bandwidth(self, nbytes: int, length: int, count: int) -> float:
        """Bytes per second of ``count`` puts of ``nbytes`` in pieces of ``length``, all under way
        at once, from the first to the far side's word that all are there."""
        data = self._data
        ranges, index = data.way(nbytes, length)
        self._near.control.say(Ask("count", count=count))
        begun = time.perf_counter()
        tickets = [data.put(ranges, index, i) for i in range(count)]
        last = data.notice()
        seconds = time.perf_counter() - begun
        if last != ACK:
            raise TransportError(f"the other side gave the notice {last} where it was not due")
        self._near.answer()
        for ticket in tickets:
            data.settle(ticket)
        return nbytes * count / seconds


@contextlib.contextmanager
def second_process(
    network: NetworkConfig, control: NetworkConfig, transport: str
) -> Iterator[Near]:
    """A far side in a process of its own on this host, with the same ``network``; the two talk
    over ``transport`` by the settings of ``control``."""
    endpoint = create_endpoint(transport, "verify", control)
    command = [sys.executable, "-m", "cloverinfer.verify.far", endpoint.address()]
    try:
        # In a session of its own: Ctrl-C is ours to hear.
        process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            _give(process, msgspec.json.encode([network, control]))
            peer = _hello(endpoint, process)
            near = Near(Control(endpoint, peer, lambda: process.poll() is None), process.pid)
            yield near
            with contextlib.suppress(TransportError):  # it may have ended before us
                near.ask(Ask("end", good=True))
                process.wait(STEP)
        finally:
            process.kill()
            process.wait(STEP)
    finally:
        endpoint.close()


def _give(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:  # its end is told by ``_hello``
        process.stdin.write(text)


def _hello(endpoint: Endpoint, process: subprocess.Popen[bytes]) -> Peer:
    end = time.monotonic() + STEP
    while time.monotonic() < end:
        for peer, _ in endpoint.poll(0.2).messages:
            return peer
        if process.poll() is not None:
            raise TransportError(f"the second process ended with status {process.returncode}")
    raise DeadlineError(f"the second process did not meet this one within {STEP:.0f} s")
