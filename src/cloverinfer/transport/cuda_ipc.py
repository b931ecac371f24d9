"""Endpoints in processes of one host whose regions may be device memory.

A shm endpoint with one more kind of put: where either side is on a device, the copy runs on a
stream of the sender, and the notice goes ahead at once with the number that the device stores in a
flag beside the ring when the copy is done. The receiver gives the notice when the flag is there:
no host waits for the device in between. ``register(nbytes)`` allocates host memory, as with shm:
device memory is its owner's, and is registered as ``DeviceMemory``. Host memory that a device reads
or writes is page-locked first.

Copies cannot be called back. Where a put fails for its deadline, its own or that of the notice that
goes ahead, the device may still read and write what it names: while its ticket is ``late``, where
there is one, and else until ``close`` has waited for it, or the process has ended.

A writer that dies takes its copies with it (its context is torn down), so memory is safe again once
the writer is gone.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..config.network import NetworkConfig
from ..core.errors import TransportError
from ._cuda_driver import Driver, load_library
from ._cuda_lane import Copies, Flag, Lane, reached
from ._cuda_memory import REGION_NAME, DeviceTarget, Offer, Pins
from ._cuda_pieces import VECTOR
from ._shared import (
    MAX_MESSAGE_BYTES,
    OffsetRanges,
    OwnRegion,
    check_index,
    check_prepare,
    check_put_bytes,
    check_region_open,
    checked_notice,
    deadline_after,
    index_array,
    is_forked,
    seconds_left,
)
from ._shm_files import start_time
from ._shm_link import Link
from .base import (
    DEFAULT_TIMEOUT,
    Capabilities,
    DeviceMemory,
    Events,
    Peer,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
)
from .shm import ShmEndpoint, ShmPeer, ShmRanges
from .shm import missing as shared_memory_missing

_ON_DEVICE, _WAKE = 16, 17
"""Kinds of record beside those of shm: a notice whose copy is under way, and nothing."""
_FLIGHT = struct.Struct("=II")
"""Payload of such a notice: which flag, and the number that it must have reached."""
_FLAGS_AT, _FLAG_BYTES, _MOST_FLAGS = 2048, 64, 16
"""Where flags lie in a ring's first page, after its header; one per device of the sender."""

_AWAKE = 300e-6
"""Seconds for which flags of copies under way are looked at without a pause: the kernel wakes a
sleeper too late by more than most copies take."""
_NAP = 100e-6
"""Seconds between two looks after that."""
_LOOK_EVERY = 0.05
"""Seconds between two looks at whether a sender that is waited for lives."""
_ENDING = 5.0


def missing() -> str:
    """See ``transport.base``."""
    if shared_memory_missing():
        return shared_memory_missing()
    if load_library() is None:
        return "libcuda.so.1 is missing: install NVIDIA's driver"
    try:
        count = Driver().device_count()
    except TransportError as error:
        return f"NVIDIA's driver does not work: {error}"
    return "" if count else "there is no CUDA device: see CUDA_VISIBLE_DEVICES"


def unreachable() -> tuple[tuple[int, int], ...]:
    """Devices of this host that cannot reach each other's memory."""
    driver = Driver()
    devices = range(driver.device_count())
    return tuple((a, b) for a in devices for b in devices if a != b and not driver.reaches(a, b))


class CudaRanges(OffsetRanges):
    """Ranges that a device copies: where both sides are for it, and through which lane."""

    def __init__(
        self, plain: Ranges, lane: Lane, source: int, target: int, on_host: bool = False
    ) -> None:
        super().__init__(plain.peer, plain.local, plain.remote)
        self.lane = lane
        self.on_host = on_host
        self.sources = self.source_offsets.astype(np.uint64) + np.uint64(source)
        self.targets = self.target_offsets.astype(np.uint64) + np.uint64(target)
        together = np.bitwise_or.reduce(self.sources) | np.bitwise_or.reduce(self.targets)
        self.aligned = (int(together) | self.length) % VECTOR == 0


@dataclass(eq=False)
class _Waiting:
    """A record that has arrived, behind a notice whose copy is under way, or that notice itself
    (``number``; its flag is in ``ring``)."""

    kind: int
    value: int
    payload: bytes
    ring: mmap.mmap

    def word(self) -> tuple[npt.NDArray[np.uint32], int]:
        at, number = _FLIGHT.unpack(self.payload)
        return _word(self.ring, at), number

    @property
    def ready(self) -> bool:
        return self.kind != _ON_DEVICE or reached(*self.word())


class CudaIpcEndpoint(ShmEndpoint):
    """See ``Endpoint``. A put that a device makes is done when it has landed; one between host
    memories is done when it returns. Pieces of one put may be copied in any order.
    """

    capabilities = Capabilities(
        name="cuda_ipc",
        cross_process=True,
        cross_host=False,
        puts_into_any_memory=False,
        max_message_bytes=MAX_MESSAGE_BYTES,
        memory=("host", "cuda"),
    )

    def __init__(
        self, name: str, network: NetworkConfig | None = None, driver: Driver | None = None
    ) -> None:
        self._driver = driver or Driver()
        super().__init__(name, network)
        self._pins = Pins(self._driver)
        self._lanes: dict[int, Lane] = {}
        self._offers: dict[str, Offer] = {}
        self._targets: dict[tuple[RegionRef, int], DeviceTarget] = {}
        self._flags: dict[tuple[Link, int], Flag] = {}
        self._flags_lock = threading.Lock()
        self._waiting: dict[ShmPeer, deque[_Waiting]] = {}
        self._own: ShmPeer | None = None
        self._asleep = False
        self._looked = 0.0

    # -- memory

    def native(self) -> None:
        """None: a notice may have to wait for a device."""

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        if not isinstance(memory, DeviceMemory):
            return super().register(memory)
        self._check_open()
        if memory.nbytes <= 0 or not 0 <= memory.device < self._driver.device_count():
            raise ValueError(f"no memory to register: {memory}")
        lane = self._lane(memory.device)
        self._registered += 1
        ref = RegionRef(self._address, f"d{self._registered}", memory.nbytes)
        with self._driver.current(lane.context):
            self._offers[ref.name] = Offer(self._driver, f"{self._prefix}-{ref.name}", memory)
        return self._keep(OwnRegion(ref, memoryview(b""), self._forget))

    def _forget(self, region: OwnRegion) -> None:
        super()._forget(region)
        offer = self._offers.pop(region.ref.name, None)
        if offer is not None:
            offer.close()
        if self._lanes:
            self._pins.unpin(f"own {region.ref.name}", self._any_lane().context)

    def _lane(self, device: int) -> Lane:
        if device not in self._lanes:
            if len(self._lanes) == _MOST_FLAGS:
                raise TransportError(f"an endpoint serves at most {_MOST_FLAGS} devices")
            self._lanes[device] = Lane(self._driver, device)
        return self._lanes[device]

    def _any_lane(self) -> Lane:
        return next(iter(self._lanes.values())) if self._lanes else self._lane(0)

    # -- puts

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self._address, peer, local, remote)
        assert isinstance(peer, ShmPeer)
        assert isinstance(remote.region, RegionRef)
        assert isinstance(local.region, OwnRegion)
        offer = self._offers.get(local.region.ref.name)
        to_device = REGION_NAME.fullmatch(remote.region.name) is not None
        if offer is None and not to_device:
            return super().prepare(peer, local, remote)
        lane = self._lane(offer.memory.device) if offer else self._any_lane()
        source = offer.memory.pointer if offer else self._pin_own(local.region, lane)
        if to_device:
            target = self._target(peer, remote.region, lane).pointer
            plain = Ranges(peer, local, remote)
        else:
            plain = super().prepare(peer, local, remote)
            assert isinstance(plain, ShmRanges)
            target = self._pin_mapped(plain, lane)
        return self._made(CudaRanges(plain, lane, source, target))

    def _made(self, ranges: CudaRanges) -> CudaRanges:
        if self._own is None:  # to be woken when another thread puts
            own = self.connect(self._address)
            assert isinstance(own, ShmPeer)
            self._own = own
        return ranges

    def _pin_own(self, region: OwnRegion, lane: Lane) -> int:
        name = f"own {region.ref.name}"
        return self._pins.pin(name, region.buffer, region.ref.nbytes, lane.context)

    def _pin_mapped(self, ranges: ShmRanges, lane: Lane) -> int:
        assert isinstance(ranges.remote.region, RegionRef)
        name = _mapped_name(ranges.remote.region)
        buffer = ranges.mapped.buffer
        return self._pins.pin(name, buffer, buffer.nbytes, lane.context)

    def _target(self, peer: ShmPeer, ref: RegionRef, lane: Lane) -> DeviceTarget:
        target = self._targets.get((ref, lane.device))
        if target is None or not target.open:
            self._drop_dead()
            target = DeviceTarget(self._driver, lane.context, peer.prefix, ref)
            self._targets[ref, lane.device] = target
        return target

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        if isinstance(ranges, ShmRanges):
            if after is None:
                return super().put(ranges, index, notice, timeout)
            ranges = self._through_device(ranges)
        assert isinstance(ranges, CudaRanges)
        notice = checked_notice(notice)
        index = index_array(index)
        check_index(ranges, index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        check_region_open(ranges.region)
        self._check_target(ranges)
        targets, sources = ranges.targets[index[:, 1]], ranges.sources[index[:, 0]]
        copies = Copies(targets, sources, ranges.length, ranges.aligned, after or 0, ranges.on_host)
        ticket = self._fly(ranges, copies, notice, deadline_after(timeout))
        self._wake()
        return ticket

    def _through_device(self, ranges: ShmRanges) -> CudaRanges:
        """For a put between host memories that must wait for an event. Where no device was used
        before, the first such put waits for what the device is doing: so loading a kernel does.

        Pieces that are not aligned to 16 bytes go by the driver's copy, which between host
        memories returns only once it is done: such a put waits for its event itself.
        """
        lane = self._any_lane()
        source, target = self._pin_own(ranges.region, lane), self._pin_mapped(ranges, lane)
        return self._made(CudaRanges(ranges, lane, source, target, on_host=True))

    def _check_target(self, ranges: CudaRanges) -> None:
        assert isinstance(ranges.remote.region, RegionRef)
        ref = ranges.remote.region
        target = self._targets.get((ref, ranges.lane.device)) or self._mapped.get(ref)
        if target is None or not target.open:
            raise TransportError(f"a region of {ranges.peer.address} is closed")

    def _fly(self, ranges: CudaRanges, copies: Copies, notice: int, deadline: float) -> Ticket:
        ticket = Ticket()
        lane = ranges.lane
        with self._link(ranges.peer, deadline) as link:
            link.check_alive()
            flag, at = self._flag(link, lane)
            flight = lane.submit(copies, flag, ticket, deadline)
            link.push(_ON_DEVICE, notice, _FLIGHT.pack(at, flight.number), deadline)
        return ticket

    def _flag(self, link: Link, lane: Lane) -> tuple[Flag, int]:
        """The lane's flag in the ring to a peer, and where in the ring it lies."""
        at = _FLAGS_AT + _FLAG_BYTES * list(self._lanes).index(lane.device)
        with self._flags_lock:
            flag = self._flags.get((link, lane.device))
            if flag is None:
                page = self._pins.pin(_ring_name(link), link.ring, mmap.PAGESIZE, lane.context)
                flag = self._flags[link, lane.device] = Flag(_word(link.ring, at), page + at)
            return flag, at

    def _wake(self) -> None:
        """Another thread may be sleeping in ``poll``, from before there was a flight to look at."""
        if self._asleep:
            assert self._own is not None
            deadline = deadline_after(_ENDING)
            with self._link(self._own, deadline) as link:
                link.push(_WAKE, 0, b"", deadline)

    # -- what arrives

    def poll(self, timeout: float) -> Events:
        self._check_open()
        deadline = deadline_after(timeout)
        events = Events()
        awake_until = 0.0
        while not events:
            left = seconds_left(deadline)
            self._asleep = True  # before looking for flights: see _wake
            self._look(events)
            if events:
                break
            if self._waiting or any(lane.flying for lane in self._lanes.values()):
                now = time.monotonic()
                awake_until = awake_until or now + _AWAKE
                self._asleep = False
                self._read(0.0 if now < awake_until else min(left, _NAP), events)
            else:
                awake_until = 0.0
                self._read(left, events)
            if left <= 0:
                break
        self._asleep = False
        return events

    def _look(self, events: Events) -> None:
        """Tickets and notices of copies that are done by now."""
        for lane in list(self._lanes.values()):
            events.tickets += lane.landed()
        for peer, queue in list(self._waiting.items()):
            while queue and (queue[0].ready or self._is_lost(peer, queue[0])):
                self._deliver(peer, queue.popleft(), events)
            if not queue:
                del self._waiting[peer]

    def _is_lost(self, peer: ShmPeer, waiting: _Waiting) -> bool:
        """Whether the copy can never be done. What its sender had stored is there by now."""
        now = time.monotonic()
        if peer.pid == os.getpid() or now - self._looked < _LOOK_EVERY:
            return False
        self._looked = now
        return start_time(peer.pid) is None

    def _deliver(self, peer: ShmPeer, waiting: _Waiting, events: Events) -> None:
        if waiting.kind != _ON_DEVICE:
            self._sort(peer, waiting.kind, waiting.value, waiting.payload, events)
        elif waiting.ready:
            events.notices.append((peer, waiting.value))
        else:
            self._dropped += 1

    def _arrive(self, ring: int, kind: int, value: int, payload: bytes, events: Events) -> None:
        peer = self._rings[ring]
        if kind == _WAKE:
            return
        if kind == _ON_DEVICE and not _makes_sense(value, payload):
            self._dropped += 1
            return
        waiting = _Waiting(kind, value, payload, self._ring_memory[ring])
        if peer in self._waiting or not waiting.ready:
            self._waiting.setdefault(peer, deque()).append(waiting)
        else:
            self._deliver(peer, waiting, events)

    # -- ends

    def _drop_dead(self) -> None:
        super()._drop_dead()
        if any(lane.flying for lane in self._lanes.values()):
            return  # what is being written to stays; there will be another time
        for key, target in list(self._targets.items()):
            if not target.open or self._is_gone(key[0]):
                target.close()
                del self._targets[key]
        links = {peer.link for peer in self._peers.values()}
        for pair in [pair for pair in self._flags if pair[0] not in links]:
            del self._flags[pair]
        wanted = {_ring_name(link) for link in links if link is not None}
        wanted |= {_mapped_name(ref) for ref in self._mapped}
        for name in self._pins.names():
            if name not in wanted and not name.startswith("own "):
                self._pins.unpin(name, self._any_lane().context)

    def _is_gone(self, ref: RegionRef) -> bool:
        return start_time(ShmPeer(ref.address).pid) is None

    def close(self) -> None:
        """Waits for copies that are under way: the receivers are to have them."""
        if self._closed or is_forked(self._owner):
            return
        deadline = deadline_after(_ENDING)
        for lane in self._lanes.values():
            lane.drain(deadline)
        super().close()
        for target in self._targets.values():
            target.close()
        self._targets.clear()
        self._flags.clear()
        for name in self._pins.names():
            self._pins.unpin(name, self._any_lane().context)
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()


def _word(ring: mmap.mmap, at: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer(ring, np.uint32, 1, at)


def _makes_sense(notice: int, payload: bytes) -> bool:
    if notice >= 1 << 32 or len(payload) != _FLIGHT.size:
        return False
    at, _ = _FLIGHT.unpack(payload)
    return bool(at in range(_FLAGS_AT, _FLAGS_AT + _FLAG_BYTES * _MOST_FLAGS, _FLAG_BYTES))


def _ring_name(link: Link) -> str:
    return f"ring {id(link)}"


def _mapped_name(ref: RegionRef) -> str:
    return f"mapped {ref.address} {ref.name}"
