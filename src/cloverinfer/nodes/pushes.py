"""The sending end of a KV transfer: each layer's blocks put as the layer ends.

A prefill node computes in one thread and puts in another, the ``Sender``; the puts of one step are
its ``StepPushes``. Only when all of them have ended does the node report the step, since the
scheduler then gives the blocks at both ends to others. What arrives, and whether it is whole, is
the receiver's business (``transfers``).
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..core.errors import PeerGoneError, TransportError
from ..kvcache.layout import PoolLayout, blocks_for
from ..transport.base import Endpoint, Peer, Ranges, Ticket
from ..wire.messages import KVChunk, KVSum, Message, PeerInfo, Push, encode
from ..wire.notices import pack_kv
from .copies import NOW, Moment
from .errands import Errands
from .rows import Row
from .source import Held, Source, layer_slices

Track = Callable[[Ticket, int], None]
"""Takes a put's ticket and the bytes that it sends."""


@dataclass
class PushJob:
    """The blocks of one row that this step's chunk completes."""

    pusher: Pusher
    row: Row
    number: int
    """Of the chunk in its transfer."""
    first: int
    """Index of the first block among the request's blocks here."""
    blocks: npt.NDArray[np.int32]
    end: int
    """Positions up to here are computed."""
    error: PeerGoneError | None = None
    """Why it could not be put; nothing more of it is."""

    @property
    def push(self) -> Push:
        assert self.row.push is not None
        return self.row.push


class Pusher(ABC):
    """The way from the local pool to one receiver's."""

    def __init__(
        self,
        endpoint: Endpoint,
        link: Peer,
        info: PeerInfo,
        source: Source,
        layout: PoolLayout,
        checksums: bool = False,
    ) -> None:
        """``source`` of the local pool, whose ``layout`` this is; ``checksums``: send them too."""
        self.name = info.name
        self.largest = source.largest
        """Blocks of a job at most."""
        self._endpoint = endpoint
        self._link = link
        self._source = source
        self._layout = layout
        self._checksums = checksums

    @abstractmethod
    def announce(self, job: PushJob) -> None:
        """Before the first layer: tells the receiver what will come, where that is known."""

    @abstractmethod
    def put_layer(self, job: PushJob, layer: int, ready: Moment, track: Track) -> None:
        """Begins to put the job's blocks of one layer, which are complete from ``ready`` on.
        ``TransportError`` where it cannot."""

    def put_layers(self, job: PushJob, layers: Sequence[int], ready: Moment, track: Track) -> None:
        """``put_layer`` of each."""
        for layer in layers:
            self.put_layer(job, layer, ready, track)

    def look(self) -> None:
        """From the node's thread: some puts have ended, and a wait may be over, or in vain."""
        self._source.look()

    def close(self) -> None:
        """From the node's thread: ends a wait with ``TransportError``."""
        self._source.close()

    def _send(self, message: Message) -> None:
        self._endpoint.send(self._link, encode(message))

    def _sum(self, layer: int, held: Held) -> int | None:
        return self._source.sum_of(layer, held) if self._checksums else None

    def _put(self, ranges: Ranges, held: Held, targets: Sequence[int], notice: int) -> Ticket:
        index = np.stack([held.rows, np.array(targets, np.int32)], axis=1)
        held.ticket = self._endpoint.put(ranges, index, notice, after=held.after.handle)
        return held.ticket


class KVPusher(Pusher):
    """Puts blocks straight into the receiver's pool, which has blocks of the same kind."""

    def __init__(
        self,
        endpoint: Endpoint,
        link: Peer,
        info: PeerInfo,
        source: Source,
        layout: PoolLayout,
        checksums: bool = False,
    ) -> None:
        super().__init__(endpoint, link, info, source, layout, checksums)
        assert info.layout is not None, f"{info.name} has no pool"
        theirs = info.layout
        self._ranges: list[Ranges] = [
            endpoint.prepare(link, source.slices(i), layer_slices(info.regions["kv"], theirs, i))
            for i in range(layout.num_layers)
        ]

    def announce(self, job: PushJob) -> None:
        row, push = job.row, job.push
        self._send(
            KVChunk(
                push.transfer,
                row.request,
                row.incarnation,
                job.number,
                job.first - push.skip,
                len(job.blocks),
            )
        )

    def put_layer(self, job: PushJob, layer: int, ready: Moment, track: Track) -> None:
        row, push = job.row, job.push
        theirs = push.blocks[job.first : job.first + len(job.blocks)]
        notice = pack_kv(push.transfer, job.number, layer)
        with self._source.hold(layer, job.blocks, ready) as held:
            crc = self._sum(layer, held)
            if crc is not None:
                of = (push.transfer, row.request, row.incarnation)
                self._send(KVSum(*of, job.number, layer, crc))
            ticket = self._put(self._ranges[layer], held, theirs, notice)
        track(ticket, len(job.blocks) * self._layout.layer_block_bytes(layer))


def plan_push(
    row: Row, blocks: npt.NDArray[np.int32], end: int, final: bool, size: int, pusher: Pusher
) -> list[PushJob]:
    """What to send once positions up to ``end`` are computed: whole blocks of ``size`` tokens, and
    at the end of the prompt the last partial one too. Marks them as pushed."""
    until = blocks_for(end, size) if final else end // size
    jobs = []
    for first in range(row.pushed, until, pusher.largest):
        some = blocks[first : min(first + pusher.largest, until)].copy()
        jobs.append(PushJob(pusher, row, row.chunks, first, some, end))
        row.chunks += 1
    row.pushed = max(row.pushed, until)
    return jobs


@dataclass
class StepPushes:
    """All puts of one step. The sender makes them; the node looks at ``ended`` and what follows."""

    jobs: Sequence[PushJob]
    nbytes: int = 0
    seconds: float = 0.0
    """Time that making the puts took the sender."""
    problem: Exception | None = None
    """A mistake of ours, which ends the step."""
    _asked: int = 0
    """Things to do that the node has asked the sender for."""
    _done: int = 0
    """Those of them that the sender has done."""
    _sealed: bool = False
    _tickets: list[tuple[PushJob, Ticket]] = field(default_factory=list)

    def announce(self) -> None:
        for job in self.jobs:
            self._attempt(job, lambda job=job: job.pusher.announce(job))

    def put_layers(self, layers: Sequence[int], ready: Moment) -> None:
        for job in self.jobs:
            self._attempt(job, lambda job=job: self._put(job, layers, ready))

    def ask(self) -> None:
        """From the node's thread: one thing more to do."""
        self._asked += 1

    def seal(self) -> None:
        """From the node's thread: nothing will be asked any more."""
        self._sealed = True

    def did(self) -> None:
        """From the sender's thread. Whoever comes last of ``did`` and ``seal`` sees ``made``."""
        self._done += 1

    @property
    def made(self) -> bool:
        """All that was asked is done, and nothing more will be."""
        return self._sealed and self._done == self._asked

    @property
    def ended(self) -> bool:
        """Every put has been made and has ended, well or not: its memory is free at both ends."""
        return self.made and all(ticket.done for _, ticket in self._tickets)

    @property
    def late(self) -> bool:
        """Once ended: a put that has failed may still read and write, see ``Ticket.late``."""
        return any(ticket.late for _, ticket in self._tickets)

    def failures(self) -> list[PeerGoneError]:
        """Once ended: one error for each receiver that could not be reached."""
        assert self.ended
        for job, ticket in self._tickets:
            if job.error is None and ticket.error is not None:
                job.error = PeerGoneError(job.pusher.name, str(ticket.error))
        errors = {job.pusher.name: job.error for job in self.jobs if job.error is not None}
        return list(errors.values())

    def _put(self, job: PushJob, layers: Sequence[int], ready: Moment) -> None:
        def track(ticket: Ticket, nbytes: int) -> None:
            self._tickets.append((job, ticket))
            self.nbytes += nbytes

        job.pusher.put_layers(job, layers, ready, track)

    def _attempt(self, job: PushJob, act: Callable[[], None]) -> None:
        """A receiver that is gone ends its own jobs alone; a mistake of ours ends the step."""
        if job.error is not None or self.problem is not None:
            return
        started = time.perf_counter()
        try:
            act()
        except TransportError as problem:
            job.error = PeerGoneError(job.pusher.name, str(problem))
        except Exception as problem:  # the sender serves other steps: the error goes to this one
            self.problem = problem
        self.seconds += time.perf_counter() - started


class Sender:
    """Makes puts in a thread of its own, in the order in which they are asked for."""

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        """``wake`` is called from the thread where a step's last put has been made after the node
        sealed it, and so may have looked in vain."""
        self._wake = wake
        self._errands = Errands(f"{name}-sender")

    def begin(self, pushes: StepPushes) -> None:
        self._ask(pushes, pushes.announce)

    def layers(self, pushes: StepPushes, layers: Sequence[int], ready: Moment = NOW) -> None:
        """``ready``: when the layers' keys and values are complete."""
        self._ask(pushes, lambda: pushes.put_layers(layers, ready))

    def _ask(self, pushes: StepPushes, act: Callable[[], None]) -> None:
        pushes.ask()
        self._errands.ask(lambda: self._do(pushes, act))

    def _do(self, pushes: StepPushes, act: Callable[[], None]) -> None:
        act()
        pushes.did()
        if pushes.made:
            self._wake()

    def close(self) -> None:
        """Ends the thread once the put under way has ended; what was not begun is dropped."""
        self._errands.close()
