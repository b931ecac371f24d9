"""The sending end of a transfer through a ring: blocks go into slots that the receiver granted.

While the ring is full the sender's thread waits, and the node goes on computing. The receiver
converts; see ``staging``.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np
import numpy.typing as npt

from ..core.errors import DeadlineError, TransportError
from ..kvcache.checksum import BlockSums
from ..kvcache.layout import PoolLayout
from ..transport.base import DEFAULT_TIMEOUT, Endpoint, Peer, Ranges, Region, Slices, Ticket
from ..wire.messages import KVPiece, KVReset, PeerInfo, StagingGrant
from ..wire.notices import pack_kv
from .pushes import Pusher, PushJob, Track, layer_slices

LEAST_SHARE = 4
"""A piece waits for this part of the ring at most, so that pieces do not become crumbs."""


class StagedPusher(Pusher):
    """Puts blocks into the slots of a ring, as many at a time as are free."""

    def __init__(
        self,
        endpoint: Endpoint,
        link: Peer,
        info: PeerInfo,
        pool: Region,
        layout: PoolLayout,
        sums: BlockSums | None = None,
    ) -> None:
        super().__init__(endpoint, link, info, layout, sums)
        self._pool = pool
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
            local = layer_slices(self._pool, self._layout, layer)
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
        """Some puts have ended: a wait for slots may be in vain."""
        with self._changed:
            self._changed.notify_all()

    def mend(self) -> None:
        """Once a put has failed and all have ended, and the connection has been made anew: the
        slots that failed puts took come back as credits. ``TransportError`` where it is gone."""
        self._tickets.clear()
        self._send(KVReset())

    def close(self) -> None:
        """Ends a wait for slots with ``TransportError``."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- from the sender's thread

    def announce(self, job: PushJob) -> None:
        """Each piece is announced as it is put."""

    def put_layer(self, job: PushJob, layer: int, track: Track) -> None:
        at = 0
        while at < len(job.blocks):
            slots = self._reserve(len(job.blocks) - at)
            self._put_piece(job, layer, at, slots, track)
            at += len(slots)

    def _put_piece(self, job: PushJob, layer: int, at: int, slots: list[int], track: Track) -> None:
        row, push, size = job.row, job.push, self._layout.block_size
        blocks = job.blocks[at : at + len(slots)]
        begin = (job.first + at) * size
        first = max(begin, push.start)
        count = min(begin + len(slots) * size, job.end) - first
        number = row.pieces.get(layer, 0)
        row.pieces[layer] = number + 1
        crc = self._sum(layer, blocks)
        self._send(
            KVPiece(
                push.transfer,
                row.request,
                row.incarnation,
                number,
                layer,
                first,
                count,
                first - begin,
                slots,
                crc,
            )
        )
        index = _index(blocks, slots)
        notice = pack_kv(push.transfer, number, layer)
        ticket = self._endpoint.put(self._ranges[layer], index, notice)
        self._tickets.append(ticket)
        track(ticket, len(slots) * self._layout.layer_block_bytes(layer))

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


def _index(blocks: npt.NDArray[np.int32], slots: list[int]) -> npt.NDArray[np.int32]:
    return np.stack([blocks, np.array(slots, np.int32)], axis=1)
