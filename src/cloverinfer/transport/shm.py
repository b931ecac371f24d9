"""Endpoints in processes of one host: regions and mailboxes in POSIX shared memory.

A region is a segment that peers map once and copy into; memory of the caller's is reached by the
kernel (``process_vm_writev``), by what a page of shared memory says of it. A mailbox is a small
segment on which its owner sleeps (a futex), and one ring per sender. Liveness of peers is seen by
pid and start time.
What notices and messages mean is not known here.
"""

from __future__ import annotations

import logging
import mmap
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np
import numpy.typing as npt

from .. import _native
from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ._shared import (
    MAX_MESSAGE_BYTES,
    OffsetRanges,
    OwnRegion,
    callers_memory,
    check_message,
    check_no_event,
    check_prepare,
    check_put_bytes,
    check_region_open,
    check_size,
    checked_notice,
    deadline_after,
    index_array,
    is_forked,
    seconds_left,
)
from ._shm_files import (
    ROOT,
    create_segment,
    lives,
    names,
    new_prefix,
    open_segment,
    publish,
    remove_leftovers,
    start_time,
    unlink,
)
from ._shm_link import MESSAGE, NOTICE, SLICE, SPILLED, Link
from .base import (
    DEFAULT_TIMEOUT,
    Capabilities,
    DeviceMemory,
    Endpoint,
    Events,
    Peer,
    Put,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
)
from .native import MailboxWire, address_of

__all__ = ["ShmEndpoint", "lives", "remove_leftovers"]

log = logging.getLogger(__name__)
_ADDRESS = re.compile(r"[a-z_]+://(cloverinfer-(\d+)-[0-9a-f]+)")
_REGION = re.compile(r"g\d+")
_CALLERS = re.compile(r"c\d+")
_SPILLED_NAME = re.compile(r"m[0-9a-f]+")
MOST_COPY_THREADS = 4
MOST_TOGETHER = 64 << 20
"""Bytes after which a native call of many puts lets others send to the same peer."""
CLOSE_SECONDS = 5.0
"""How long taking back a region of the caller's memory waits for who is writing to it."""
_STATE = struct.Struct("=I")
_OPEN, _TAKEN_BACK = 0x4E45504F, 0x45534C43
"""First word of a region's segment, stored by its owner. A put that races with the change may go
either way; the memory stays mapped on both sides, so nothing worse can happen."""


def missing() -> str:
    """See ``transport.base``."""
    return "" if os.access(ROOT, os.W_OK) else f"{ROOT} is missing: mount a tmpfs there"


def _copy_threads() -> int:
    """A few fill the memory's bandwidth; more would only take cores from who computes."""
    return min(len(os.sched_getaffinity(0)), MOST_COPY_THREADS)


class ShmPeer(Peer):
    """``link`` is the way there; made by ``connect``, or by the first answer to what came."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise TransportError(f"{address!r} is not the address of an endpoint here")
        self.prefix = match[1]
        self.pid = int(match[2])
        self.lock = Lock()
        self.link: Link | None = None

    def drop_link(self, only_if_gone: bool = False) -> None:
        """A later put makes a new link, and fails if there is nobody any more."""
        link = self.link
        if link is not None and not (only_if_gone and link.peer_lives):
            self.link = None
            link.close()


class _Mapped:
    """A peer's region in this process."""

    def __init__(self, peer: ShmPeer, ref: RegionRef) -> None:
        if not _REGION.fullmatch(ref.name):
            raise TransportError(f"region {ref.name} of {ref.address} is not shared memory")
        self._map = open_segment(f"{peer.prefix}-{ref.name}")
        self._pid = peer.pid
        if len(self._map) < mmap.PAGESIZE + ref.nbytes:
            raise TransportError(f"region {ref.name} of {ref.address} is smaller than promised")
        self.buffer = memoryview(self._map)[mmap.PAGESIZE : mmap.PAGESIZE + ref.nbytes]

    @property
    def open(self) -> bool:
        return bool(_STATE.unpack_from(self._map)[0] == _OPEN)

    @property
    def of_use(self) -> bool:
        return self.open and start_time(self._pid) is not None


class _Foreign:
    """Private memory of a peer, which named it in a page of shared memory."""

    def __init__(self, peer: ShmPeer, ref: RegionRef) -> None:
        self._page = open_segment(f"{peer.prefix}-{ref.name}")
        self._pid = peer.pid
        if len(self._page) < _native.CALLERS_PAGE_BYTES:
            raise TransportError(f"region {ref.name} of {ref.address} is smaller than promised")
        _native.may_write(self._page, peer.pid)

    @property
    def open(self) -> bool:
        return bool(_STATE.unpack_from(self._page)[0] == 1)

    @property
    def of_use(self) -> bool:
        return self.open and start_time(self._pid) is not None

    def write(self, ranges: OffsetRanges, index: npt.NDArray[np.int32]) -> None:
        _native.write_ranges(
            self._page,
            self._pid,
            ranges.target_offsets,
            ranges.source,
            ranges.source_offsets,
            ranges.length,
            index,
        )

    def part(
        self, ranges: OffsetRanges, index: npt.NDArray[np.int32], notice: int
    ) -> _native.ForeignPut:
        offsets = ranges.target_offsets, ranges.source_offsets
        return self._page, offsets[0], ranges.source, offsets[1], ranges.length, index, notice


class ShmRanges(OffsetRanges):
    def __init__(
        self, peer: Peer, local: Slices, remote: Slices, target: _Mapped | _Foreign
    ) -> None:
        super().__init__(peer, local, remote)
        self.target = target

    @property
    def mapped(self) -> _Mapped:
        """The target, where it is known to be shared memory."""
        assert isinstance(self.target, _Mapped)
        return self.target


class ShmEndpoint(Endpoint):
    """See ``Endpoint``. A sender waits while a receiver's ring is full; a receiver that has died
    is noticed within a tenth of a second. What was sent before ``close`` can still be read.
    """

    capabilities = Capabilities(
        name="shm",
        cross_process=True,
        cross_host=False,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        self.name = name
        self._copy_threads = (network or NetworkConfig()).copy_threads or _copy_threads()
        self._owner = os.getpid()
        self._threads: _native.CopyThreads | None = None
        self._prefix = new_prefix()
        self._address = f"{self.capabilities.name}://{self._prefix}"
        self._closed = False
        self._registered = 0
        self._dropped = 0
        self._regions: dict[str, OwnRegion] = {}
        self._peers: dict[str, ShmPeer] = {}
        self._rings: dict[int, ShmPeer] = {}
        self._ring_memory: dict[int, mmap.mmap] = {}
        self._mapped: dict[RegionRef, _Mapped | _Foreign] = {}
        mailbox = create_segment(f"{self._prefix}-new", mmap.PAGESIZE)
        started = start_time(os.getpid())
        assert started is not None
        _native.format_mailbox(mailbox, os.getpid(), started)
        self._reader = _native.MailboxReader(mailbox)
        publish(f"{self._prefix}-new", f"{self._prefix}-mailbox")

    @property
    def dropped(self) -> int:
        """Records, rings and spilled messages that made no sense."""
        return self._dropped + self._reader.malformed

    def address(self) -> str:
        return self._address

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        self._registered += 1
        if isinstance(memory, int):
            return self._register_shared(memory)
        return self._register_callers(callers_memory(memory))

    def _register_callers(self, buffer: memoryview) -> Region:
        if not self.capabilities.puts_into_any_memory:
            ref = RegionRef(self._address, f"local{self._registered}", buffer.nbytes)
            return self._keep(OwnRegion(ref, buffer, lambda region: self._forget(region)))
        ref = RegionRef(self._address, f"c{self._registered}", buffer.nbytes)
        name = f"{self._prefix}-{ref.name}"
        page = create_segment(name, mmap.PAGESIZE)
        _native.open_page(page, buffer)

        def take_back(region: OwnRegion) -> None:
            if not _native.close_page(page, CLOSE_SECONDS):
                log.warning("%s: a peer may have died while it wrote to %s", self.name, ref.name)
            unlink(name)
            self._forget(region)

        return self._keep(OwnRegion(ref, buffer, take_back))

    def _register_shared(self, nbytes: int) -> Region:
        check_size(nbytes)
        ref = RegionRef(self._address, f"g{self._registered}", nbytes)
        name = f"{self._prefix}-{ref.name}"
        segment = create_segment(name, mmap.PAGESIZE + nbytes)
        _STATE.pack_into(segment, 0, _OPEN)

        def take_back(region: OwnRegion) -> None:
            _STATE.pack_into(segment, 0, _TAKEN_BACK)
            unlink(name)
            self._forget(region)

        buffer = memoryview(segment)[mmap.PAGESIZE : mmap.PAGESIZE + nbytes]
        return self._keep(OwnRegion(ref, buffer, take_back))

    def _keep(self, region: OwnRegion) -> Region:
        self._regions[region.ref.name] = region
        return region

    def _forget(self, region: OwnRegion) -> None:
        self._regions.pop(region.ref.name, None)

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        if not address.startswith(f"{self.capabilities.name}://"):
            raise TransportError(f"{address!r} is no address of the {self.capabilities.name} wire")
        self._drop_dead()
        peer = self._peers.get(address) or ShmPeer(address)
        with self._link(peer, deadline_after(timeout)) as link:
            link.check_alive()
        return self._peers.setdefault(address, peer)

    @contextmanager
    def _link(self, peer: Peer, deadline: float) -> Iterator[Link]:
        assert isinstance(peer, ShmPeer)
        if not peer.lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError(f"other threads keep the way to {peer.address} busy")
        try:
            if peer.link is None:
                peer.link = Link(self._address, peer.prefix)
            yield peer.link
        except TransportError as error:
            raise type(error)(f"{self.name} to {peer.address}: {error}") from error
        finally:
            peer.lock.release()

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self._address, peer, local, remote)
        assert isinstance(peer, ShmPeer)
        assert isinstance(remote.region, RegionRef)
        target = self._mapped.get(remote.region)
        if target is None or not target.open:
            self._drop_dead()
            kind = _Foreign if _CALLERS.fullmatch(remote.region.name) else _Mapped
            target = self._mapped[remote.region] = kind(peer, remote.region)
        return ShmRanges(peer, local, remote, target)

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        assert isinstance(ranges, ShmRanges)
        notice = checked_notice(notice)
        check_no_event(after)
        index = index_array(index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        deadline = deadline_after(timeout)
        check_region_open(ranges.region)
        if not ranges.target.open:
            raise TransportError(f"a region of {ranges.peer.address} is closed")
        self._copy(ranges, index)
        with self._link(ranges.peer, deadline) as link:
            link.push(NOTICE, notice, b"", deadline)
        return Ticket(done=True)

    def put_many(
        self, puts: Sequence[Put], timeout: float = DEFAULT_TIMEOUT, after: int | None = None
    ) -> list[Ticket]:
        """Into memory of the peer's by one native call for many, during which other threads run.
        What that does not do, and why, is for ``put`` to say."""
        made = 0
        while after is None and made < len(puts):
            more = self._put_natively(puts[made:], deadline_after(timeout))
            made += more
            if not more:
                break
        rest = super().put_many(puts[made:], timeout, after)
        return [Ticket(done=True) for _ in range(made)] + rest

    def _put_natively(self, puts: Sequence[Put], deadline: float) -> int:
        """How many of the first were made."""
        self._check_open()
        peer, parts, nbytes = puts[0].ranges.peer, [], 0
        assert isinstance(peer, ShmPeer)
        for each in puts:
            part = self._foreign_part(peer, each)
            if part is None or nbytes > MOST_TOGETHER:
                break
            parts.append(part)
            nbytes += len(each.index) * each.ranges.local.length
        if not parts:
            return 0
        try:
            with self._link(peer, deadline) as link:
                link.check_alive()
                return _native.write_and_tell(link.writer, peer.pid, parts, SLICE)
        except TransportError:
            return 0

    def _foreign_part(self, peer: Peer, put: Put) -> _native.ForeignPut | None:
        """None for what ``put`` alone does, or refuses."""
        ranges = put.ranges
        assert isinstance(ranges, ShmRanges)
        if not isinstance(ranges.target, _Foreign) or ranges.peer is not peer:
            return None
        try:
            check_region_open(ranges.region)
            return ranges.target.part(ranges, index_array(put.index), checked_notice(put.notice))
        except (TransportError, ValueError):
            return None

    def _copy(self, ranges: ShmRanges, index: npt.NDArray[np.int32]) -> None:
        if isinstance(ranges.target, _Foreign):
            ranges.target.write(ranges, index)
            return
        _native.copy_ranges(
            ranges.target.buffer,
            ranges.target_offsets,
            ranges.source,
            ranges.source_offsets,
            ranges.length,
            index,
            self._threads_for(len(index) * ranges.length),
        )

    def _threads_for(self, nbytes: int) -> _native.CopyThreads | None:
        """None below what is worth waking them; made at the first large put."""
        if nbytes < _native.LARGE_COPY_BYTES or self._copy_threads == 1:
            return None
        if self._threads is None:
            self._threads = _native.CopyThreads(self._copy_threads)
        return self._threads

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        check_message(message, self.capabilities.max_message_bytes)
        deadline = deadline_after(timeout)
        with self._link(peer, deadline) as link:
            link.send(message, deadline)

    def poll(self, timeout: float) -> Events:
        self._check_open()
        deadline = deadline_after(timeout)
        events = Events()
        while not events:
            left = seconds_left(deadline)
            self._read(left, events)
            if left <= 0:
                break
        return events

    def _read(self, timeout: float, events: Events) -> None:
        """Waits for the first record, or less long."""
        if self._reader.take_announcement():
            self._adopt_rings()
        for ring, kind, value, payload in self._reader.poll(timeout):
            self._arrive(ring, kind, value, payload, events)

    def _arrive(self, ring: int, kind: int, value: int, payload: bytes, events: Events) -> None:
        self._sort(self._rings[ring], kind, value, payload, events)

    def _sort(self, peer: ShmPeer, kind: int, value: int, payload: bytes, events: Events) -> None:
        if kind == NOTICE and value < 1 << 32:
            events.notices.append((peer, value))
        elif kind == MESSAGE:
            events.messages.append((peer, payload))
        elif kind == SPILLED:
            self._read_spilled(peer, value, payload, events)
        else:
            self._dropped += 1

    def _read_spilled(self, peer: ShmPeer, size: int, payload: bytes, events: Events) -> None:
        what = payload.decode("ascii", "replace")
        if not _SPILLED_NAME.fullmatch(what):
            self._dropped += 1
            return
        name = f"{self._prefix}-{what}"
        try:
            segment = open_segment(name)
        except TransportError:
            self._dropped += 1
            return
        unlink(name)
        if len(segment) == size:
            events.messages.append((peer, segment[:]))
        else:
            self._dropped += 1

    def _adopt_rings(self) -> None:
        """Maps what senders have made since; the names are not needed any more."""
        for name in names(f"{self._prefix}-r"):
            try:
                memory = open_segment(name)
                address = _native.ring_sender(memory)
                peer = self._peers.get(address) or ShmPeer(address)
                ring = self._reader.add_ring(memory)
                self._rings[ring] = self._peers.setdefault(address, peer)
                self._ring_memory[ring] = memory
            except TransportError:
                self._dropped += 1
            unlink(name)
        self._drop_dead()

    def _drop_dead(self) -> None:
        """Unmaps what nobody can use any more: rings of senders that have gone, once they are
        read, and regions that were taken back. ``Peer`` objects stay as they are.
        """
        for ring, peer in list(self._rings.items()):
            # First whether it lives, then whether all is read: the dead write no more.
            if self._reader.finished(ring, start_time(peer.pid) is None):
                self._reader.remove_ring(ring)
                del self._rings[ring], self._ring_memory[ring]
        for ref, mapped in list(self._mapped.items()):
            if not mapped.of_use:
                del self._mapped[ref]
        for peer in self._peers.values():
            # A thread that holds the lock finds out by itself; the next time will do.
            if peer.lock.acquire(blocking=False):
                peer.drop_link(only_if_gone=True)
                peer.lock.release()

    def native(self) -> MailboxWire | None:
        return MailboxWire(self, self._reader)

    def rings_of(self, peer: Peer) -> list[int]:
        """The rings through which the peer sends, of those that are mapped."""
        return [ring for ring, sender in self._rings.items() if sender is peer]

    def writer_to(self, peer: Peer) -> _native.MailboxWriter | None:
        """The way to a peer that lives and has been connected to."""
        assert isinstance(peer, ShmPeer)
        link = peer.link
        return link.writer if link is not None and link.peer_lives else None

    def first_target(self, ranges: Ranges) -> int:
        assert isinstance(ranges, ShmRanges)
        if not ranges.target.open:
            raise TransportError(f"a region of {ranges.peer.address} is closed")
        return address_of(ranges.mapped.buffer) + int(ranges.target_offsets[0])

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Nothing is to be done: the writer itself writes. A process that is gone writes no more,
        nor does one whose puts have ended."""

    def close(self) -> None:
        if self._closed or is_forked(self._owner):
            return
        self._closed = True
        self._reader.close()
        for region in list(self._regions.values()):
            region.close()
        for peer in self._peers.values():
            peer.drop_link()
        for ring in self._rings:
            self._reader.remove_ring(ring)
        self._rings.clear()
        self._ring_memory.clear()
        # After reader.close(): a sender that makes a ring from now on removes it itself.
        for name in names(f"{self._prefix}-"):
            unlink(name)
        self._mapped.clear()
        self._threads = None

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the endpoint {self.name} is closed")
