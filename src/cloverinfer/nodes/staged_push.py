"""The sending end of a transfer through a ring: blocks go into slots that the receiver granted.

While the ring is full the sender's thread waits, and the node goes on computing. The receiver
converts; see ``staging``.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from ..core.errors import DeadlineError, TransportError
from ..kvcache.layout import PoolLayout
from ..transport.base import DEFAULT_TIMEOUT, Endpoint, Peer, Ranges, Slices, Ticket
from ..wire.messages import KVPiece, KVReset, PeerInfo, StagingGrant
from ..wire.notices import pack_kv
from .copies import Moment
from .pushes import Pusher, PushJob, Track
from .source import Source

LEAST_SHARE = 4
"""A piece waits for this part of the ring at most, so that pieces do not become crumbs."""


class StagedPusher(Pusher):
    """Puts blocks into the slots of a ring, as many at a time as are free."""

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
        self.largest = layout.num_blocks  # pieces are as large as slots are free
        self._ranges: list[Ranges] = []
        self._slots = 0
        self._free: deque[int] = deque()
        self._taken: set[int] = set()
        self._tickets: list[Ticket] = []
        """Of puts that may be under way; where one has failed, no credit will come for it."""
        self._closed = False
        self._changed = threading.Condition()

    # -- from the node's thread

    def grant(self, grant: StagingGrant) -> None:
        """The ring; once, before anything can be put."""
        offsets = np.arange(grant.slots, dtype=np.int64) * grant.slot_bytes
        ranges = []
        for layer in range(self._layout.num_layers):
            local = self._source.slices(layer)
            remote = Slices(grant.region, offsets, local.length)
            ranges.append(self._endpoint.prepare(self._link, local, remote))
        with self._changed:
            if self._ranges:
                return
            self._ranges, self._slots = ranges, grant.slots
            self._free.extend(range(grant.slots))
            self._changed.notify_all()

    def credit(self, slots: list[int]) -> None:
        """The receiver is done with these; slots that are free already are left alone."""
        with self._changed:
            for slot in slots:
                if slot in self._taken:
                    self._taken.discard(slot)
                    self._free.append(slot)
            self._changed.notify_all()

    def look(self) -> None:
        super().look()
        with self._changed:
            self._changed.notify_all()

    def mend(self) -> None:
        """Once a put has failed and all have ended, and the connection has been made anew: the
        slots that failed puts took come back as credits. ``TransportError`` where it is gone."""
        self._tickets.clear()
        self._send(KVReset())

    def close(self) -> None:
        super().close()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- from the sender's thread

    def announce(self, job: PushJob) -> None:
        """Each piece is announced as it is put."""

    def put_layer(self, job: PushJob, layer: int, ready: Moment, track: Track) -> None:
        at = 0
        while at < len(job.blocks):
            slots = self._reserve(min(len(job.blocks) - at, self._source.largest))
            blocks = job.blocks[at : at + len(slots)]
            with self._source.hold(layer, blocks, ready) as held:
                piece = self._piece(job, layer, at, slots, self._sum(layer, held))
                self._send(piece)
                notice = pack_kv(piece.transfer, piece.number, layer)
                ticket = self._put(self._ranges[layer], held, slots, notice)
            self._tickets.append(ticket)
            track(ticket, len(slots) * self._layout.layer_block_bytes(layer))
            at += len(slots)

    def _piece(
        self, job: PushJob, layer: int, at: int, slots: list[int], crc: int | None
    ) -> KVPiece:
        """The next one of the job's row and layer: blocks from ``at`` on, one for each slot."""
        row, push, size = job.row, job.push, self._layout.block_size
        begin = (job.first + at) * size
        first = max(begin, push.start)
        count = min(begin + len(slots) * size, job.end) - first
        number = row.pieces.get(layer, 0)
        row.pieces[layer] = number + 1
        of = (push.transfer, row.request, row.incarnation)
        return KVPiece(*of, number, layer, first, count, first - begin, slots, crc)

    def _reserve(self, wanted: int) -> list[int]:
        """Free slots, at most ``wanted``; waits while the ring is full."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ready(wanted), DEFAULT_TIMEOUT):
                raise DeadlineError(
                    f"the staging ring of {self.name} stayed full for {DEFAULT_TIMEOUT:g} s"
                )
            failed = self._failed()
            if failed is not None:
                raise TransportError(str(failed))
            if self._closed:
                raise TransportError("the node is closing")
            slots = [self._free.popleft() for _ in range(min(wanted, len(self._free)))]
            self._taken.update(slots)
            return slots

    def _ready(self, wanted: int) -> bool:
        least = min(wanted, max(1, self._slots // LEAST_SHARE))
        if self._closed or self._failed() is not None:
            return True
        return bool(self._ranges) and len(self._free) >= least

    def _failed(self) -> Exception | None:
        """Why a put has failed since the last ``mend``."""
        self._tickets = [t for t in self._tickets if not t.done or t.error is not None]
        return next((t.error for t in self._tickets if t.done), None)
