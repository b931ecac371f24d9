"""A transfer as prefill sees it: what it still has to push, and to whom.

Values and their rules; who meets whom, threads and time are ``outbox``'s business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...core.errors import PeerGoneError
from ...nodes.copies import NOW, Moment
from ...nodes.pushes import StepPushes, Track
from ...transport import Peer, Put, Ranges
from ...wire.messages import KVChunk
from ...wire.notices import pack_kv
from .courier import Wire
from .grid import Index, Match
from .plan import SendStart
from .staged import Outlet
from .wire import Drop, Grant, Worker, encode


@dataclass
class Target:
    """One decode worker. Made when a transfer first names its meeting point; gone when lost."""

    host: str
    port: int
    nonce: int
    """Of the greeting that its next answer belongs to."""
    knocked: float
    pause: float = 1.0
    """Until it is knocked again."""
    worker: Worker | None = None
    """Set once it has answered."""
    pusher: TargetPusher | None = None
    """Set once it is met and connected."""
    heard: float = 0.0
    """When something last came from it, or was first waited for, by its wire's clock
    (``Wire.listened``); of worth once it is met."""
    refused: str = ""
    without: set[str] = field(default_factory=set)
    """Wires over which its memory could not be reached."""

    @property
    def place(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def silence(self) -> float:
        """Seconds for which it was listened to in vain."""
        return 0.0 if self.pusher is None else self.pusher.wire.listened - self.heard

    def is_at(self, peer: Peer) -> bool:
        return self.pusher is not None and self.pusher.peer.address == peer.address

    def hear(self) -> None:
        """It has said something, or is waited for from now on."""
        if self.pusher is not None:
            self.heard = self.pusher.wire.listened


@dataclass
class Leg:
    """One transfer's way to one target."""

    target: Target
    claimed: bool = False
    grant: Grant | None = None
    pushed: int = 0
    """Of the granted blocks."""
    chunks: int = 0
    open: list[StepPushes] = field(default_factory=list)
    """With puts of this leg that may be under way."""
    dropping: Drop | None = None
    """The target takes no more, and waits to hear that nothing is on its way."""
    over: bool = False
    """Nothing more is pushed."""

    @property
    def whole(self) -> bool:
        return self.grant is not None and self.pushed == len(self.grant.blocks)


@dataclass
class Outgoing:
    start: SendStart
    deadline: float
    """Until then every leg must be granted."""
    legs: dict[tuple[str, int], Leg] = field(default_factory=dict)
    routed: bool = False
    """``legs`` are all there will be."""
    blocks: list[int] = field(default_factory=list)
    """The request's table, in blocks of the grids."""
    planned: int = 0
    """Prompt positions that exist once the step under way is over."""
    computed: int = 0
    """Those that exist, from ``ready`` on."""
    ready: Moment = NOW
    finished: bool = False
    """The scheduler has done with the request and waits for its blocks."""
    failed: str = ""

    @property
    def waits(self) -> bool:
        """For a target, or for its grant."""
        return not self.routed or any(
            leg.grant is None and not leg.over for leg in self.legs.values()
        )

    @property
    def busy(self) -> bool:
        """Puts may be under way, which read the blocks."""
        return any(leg.open for leg in self.legs.values())

    @property
    def done(self) -> bool:
        """Nothing more will be read from the blocks."""
        if self.busy:
            return False
        return bool(self.failed) or (self.routed and all(leg.over for leg in self.legs.values()))

    def jobs(self, leg: Leg, until: int) -> Iterator[Job]:
        """All that positions up to ``until`` newly complete of the leg's blocks."""
        while (job := self._next_job(leg, until)) is not None:
            yield job

    def _next_job(self, leg: Leg, until: int) -> Job | None:
        """What positions up to ``until`` newly complete of the leg's blocks: whole ones, and with
        the prompt's end the last; some of them where they are too many at once. Marks them as
        pushed."""
        grant = leg.grant
        if grant is None or leg.over or self.failed:
            return None
        assert leg.target.pusher is not None
        size = leg.target.pusher.block_size
        ready = until - grant.start
        blocks = len(grant.blocks) if until >= grant.end else max(ready, 0) // size
        if blocks <= leg.pushed:
            return None
        blocks = min(blocks, leg.pushed + leg.target.pusher.largest)
        first, number = leg.pushed, leg.chunks
        leg.pushed, leg.chunks = blocks, number + 1
        begin = grant.start + first * size
        end = min(grant.start + blocks * size, grant.end)
        mine = np.array(self.blocks, np.int32)
        return Job(leg.target.pusher, grant, number, first, blocks - first, begin, end, mine)


@dataclass
class Job:
    """Stands where a ``PushJob`` does in ``StepPushes``: a stretch of one leg, in every layer."""

    pusher: TargetPusher
    grant: Grant
    number: int
    """Of the chunk in its leg."""
    first: int
    count: int
    """Granted blocks ``first`` to ``first + count - 1``."""
    begin: int
    end: int
    """Positions ``begin`` to ``end - 1``."""
    mine: Index
    """The request's blocks here, from position 0 on."""
    error: PeerGoneError | None = None
    _rows: dict[tuple[int, ...], Index] = field(default_factory=dict)

    def rows(self, match: Match) -> Index:
        """The same for layers that are cut alike."""
        key = match.step, match.pieces, match.mine.block_size, match.theirs.block_size
        if key not in self._rows:
            theirs = np.array(self.grant.blocks, np.int32)
            self._rows[key] = match.index(self.mine, theirs, self.begin, self.end, self.grant.start)
        return self._rows[key]


class TargetPusher:
    """Puts jobs into one target's memory; called from the sender's thread."""

    def __init__(
        self,
        name: str,
        wire: Wire,
        peer: Peer,
        matches: list[Match],
        ranges: list[Ranges],
        outlets: Sequence[Outlet | None],
    ) -> None:
        """By layer: ``matches``, their ``ranges``, and the ways through host memory, where those
        lead from there. ``ConfigError`` where that does not hold a block."""
        self.name = name
        self.wire = wire
        self.peer = peer
        self.block_size = matches[0].theirs.block_size
        self._matches = matches
        self._ranges = ranges
        self._outlets = outlets
        self.largest = min((each.largest for each in outlets if each is not None), default=1 << 31)
        """Blocks of a job at most."""

    def announce(self, job: Job) -> None:
        grant = job.grant
        chunk = KVChunk(grant.slot, grant.number, grant.attempt, job.number, job.first, job.count)
        self.wire.endpoint.send(self.peer, encode(chunk))

    def put_layers(self, job: Job, layers: Sequence[int], ready: Moment, track: Track) -> None:
        if self.wire.stage is not None:
            for layer in layers:
                self._put_copy(job, layer, ready, track)
            return
        puts = [Put(self._ranges[i], job.rows(self._matches[i]), _notice(job, i)) for i in layers]
        endpoint, seconds = self.wire.endpoint, self.wire.put_seconds
        tickets = endpoint.put_many(puts, seconds, ready.handle)
        for put, ticket in zip(puts, tickets, strict=True):
            track(ticket, len(put.index) * put.ranges.local.length)

    def _put_copy(self, job: Job, layer: int, ready: Moment, track: Track) -> None:
        """By way of the wire's circle of host memory; returns once it is copied there."""
        stage, outlet, ranges = self.wire.stage, self._outlets[layer], self._ranges[layer]
        assert stage is not None
        assert outlet is not None
        index = outlet.fetch(job.rows(self._matches[layer]), ready)
        notice = _notice(job, layer)
        ticket = self.wire.endpoint.put(ranges, index, notice, self.wire.put_seconds)
        stage.circle.put(ticket)
        track(ticket, len(index) * ranges.local.length)


def _notice(job: Job, layer: int) -> int:
    return pack_kv(job.grant.slot, job.number, layer)
