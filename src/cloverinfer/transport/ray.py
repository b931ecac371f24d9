"""The reference path over Ray: each endpoint has a small mailbox actor that holds what arrives.

A put ships its bytes to the receiver's mailbox actor; the receiver's ``poll`` fetches them and
writes them into its own region before it reports the notice. Correct, and slow on purpose: every
put waits for the actor's answer, which is also what keeps the order. The only file of this room
that imports Ray; the process must be connected to a cluster already.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import ray

from .. import _native
from ..config.network import NetworkConfig
from ..core.errors import DeadlineError, TransportError
from ._shared import (
    MAX_MESSAGE_BYTES,
    OffsetRanges,
    OwnRegion,
    allocate,
    callers_memory,
    check_index,
    check_message,
    check_no_event,
    check_prepare,
    check_put_bytes,
    check_region_open,
    checked_notice,
    deadline_after,
    index_array,
    is_forked,
    seconds_left,
)
from .base import (
    DEFAULT_TIMEOUT,
    Capabilities,
    DeviceMemory,
    Endpoint,
    Events,
    Peer,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
)

NAMESPACE = "cloverinfer"
_ADDRESS = re.compile(r"ray://(cloverinfer-\d+-[0-9a-f]+)")
_ANSWER = 5.0
"""Seconds beyond the wait that was asked for in which the own mailbox must answer."""


def missing() -> str:
    """See ``transport.base``."""
    return "" if ray.is_initialized() else "this process is not connected to Ray: use executor ray"


def join() -> None:
    """Connects this process to the cluster at RAY_ADDRESS, or the one of this host."""
    if ray.is_initialized():
        return
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    except (ConnectionError, ValueError) as error:
        raise TransportError(
            "there is no Ray cluster to join: run `ray start --head`, or set RAY_ADDRESS"
        ) from error


class Parcel(NamedTuple):
    """The bytes of one put: ``data`` cut into ``length`` bytes for each of ``offsets``."""

    region: str
    offsets: npt.NDArray[np.int64]
    length: int
    data: npt.NDArray[np.uint8]


class Item(NamedTuple):
    """What a mailbox holds: a message, or a notice with its parcel (None: no bytes)."""

    sender: str
    value: int | bytes
    parcel: Parcel | None = None


class Mailbox:
    """The actor. All its methods run on one event loop, none of them blocks."""

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._arrived = asyncio.Event()
        self._regions: dict[str, int] = {}
        self._shut = False

    async def shut(self) -> None:
        """From its answer on nothing is taken in; ``ray.kill`` alone takes effect later."""
        self._shut = True

    async def open_region(self, name: str, nbytes: int) -> None:
        self._regions[name] = nbytes

    async def close_region(self, name: str) -> None:
        self._regions.pop(name, None)

    async def region_size(self, name: str) -> int:
        """Bytes of an open region; -1 where there is none."""
        self._check_not_shut()
        return self._regions.get(name, -1)

    async def deliver(self, item: Item, region: str | None) -> bool:
        """False: the region that the put is for is closed."""
        self._check_not_shut()
        if region is not None and region not in self._regions:
            return False
        self._items.append(item)
        self._arrived.set()
        return True

    async def take(self, timeout: float) -> list[Item]:
        """All that has arrived, waiting up to ``timeout`` seconds for the first of it."""
        if not self._items and timeout > 0:
            self._arrived.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), timeout)
        items, self._items = self._items, []
        return items

    def _check_not_shut(self) -> None:
        if self._shut:
            raise TransportError("the endpoint is closed")


class RayPeer(Peer):
    """``mailbox`` is the handle of its actor; made by ``connect`` or the first answer."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        match = _ADDRESS.fullmatch(address)
        if match is None:
            raise TransportError(f"{address!r} is not the address of a ray endpoint")
        self.actor_name = match[1]
        self.lock = Lock()
        self.mailbox: Any = None


class RayRanges(OffsetRanges):
    def __init__(self, peer: Peer, local: Slices, remote: Slices) -> None:
        super().__init__(peer, local, remote)
        self.target = cast(RegionRef, remote.region).name


def _answer(reference: Any, timeout: float, what: str) -> Any:
    """``ray.get`` with our errors."""
    try:
        return ray.get(reference, timeout=timeout)
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineError(f"{what}: no answer in {timeout:.3g} s") from error
    except ray.exceptions.RayError as error:
        raise TransportError(f"{what}: {error}") from error


class RayEndpoint(Endpoint):
    """See ``Endpoint``. Puts and messages that the receiver cannot place any more (its region was
    closed after they were sent) are counted in ``dropped``.
    """

    capabilities = Capabilities(
        name="ray",
        cross_process=True,
        cross_host=True,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        if not ray.is_initialized():
            raise TransportError("the ray transport needs a process that is connected to Ray")
        self.name = name
        self.dropped = 0
        self._actor_name = f"cloverinfer-{os.getpid()}-{secrets.token_hex(6)}"
        self._address = f"ray://{self._actor_name}"
        self._owner = os.getpid()
        self._closed = False
        self._registered = 0
        self._regions: dict[str, OwnRegion] = {}
        self._peers: dict[str, RayPeer] = {}
        self._taking: Any = None
        options = {"name": self._actor_name, "namespace": NAMESPACE, "num_cpus": 0}
        actor: Any = ray.remote(Mailbox)
        self._mailbox: Any = actor.options(**options).remote()
        try:
            _answer(self._mailbox.take.remote(0.0), DEFAULT_TIMEOUT, f"{name}: own mailbox")
        except TransportError:
            ray.kill(self._mailbox)
            raise

    def address(self) -> str:
        return self._address

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._check_open()
        buffer = allocate(memory) if isinstance(memory, int) else callers_memory(memory)
        self._registered += 1
        ref = RegionRef(self._address, f"g{self._registered}", buffer.nbytes)
        opened = self._mailbox.open_region.remote(ref.name, ref.nbytes)
        _answer(opened, DEFAULT_TIMEOUT, f"{self.name}: own mailbox")
        region = OwnRegion(ref, buffer, self._take_back)
        self._regions[ref.name] = region
        return region

    def _take_back(self, region: OwnRegion) -> None:
        del self._regions[region.ref.name]
        if not self._closed:
            closing = self._mailbox.close_region.remote(region.ref.name)
            _answer(closing, DEFAULT_TIMEOUT, f"{self.name}: own mailbox")

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._check_open()
        peer = self._peers.get(address) or RayPeer(address)
        self._call(peer, deadline_after(timeout), "region_size", "")
        return self._peers.setdefault(address, peer)

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._check_open()
        check_prepare(self._address, peer, local, remote)
        ref = cast(RegionRef, remote.region)
        size = self._call(peer, deadline_after(DEFAULT_TIMEOUT), "region_size", ref.name)
        if size != ref.nbytes:
            raise TransportError(f"{peer.address} has no region {ref.name} of {ref.nbytes} bytes")
        return RayRanges(peer, local, remote)

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        self._check_open()
        assert isinstance(ranges, RayRanges)
        notice = checked_notice(notice)
        check_no_event(after)
        index = index_array(index)
        check_put_bytes(ranges, index, self.capabilities.max_put_bytes)
        check_index(ranges, index)
        check_region_open(ranges.region)
        item = Item(self._address, notice, _pack(ranges, index) if len(index) else None)
        deadline = deadline_after(timeout)
        if not self._call(ranges.peer, deadline, "deliver", item, ranges.target):
            raise TransportError(f"{ranges.peer.address} has closed its region {ranges.target}")
        return Ticket(done=True)

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._check_open()
        check_message(message, self.capabilities.max_message_bytes)
        self._call(peer, deadline_after(timeout), "deliver", Item(self._address, message), None)

    def _call(self, peer: Peer, deadline: float, method: str, *arguments: Any) -> Any:
        """One call of the peer's mailbox, and its answer; one at a time, which keeps the order."""
        assert isinstance(peer, RayPeer)
        what = f"{self.name} to {peer.address}"
        if not peer.lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError(f"{what}: other threads keep the way busy")
        try:
            if peer.mailbox is None:
                peer.mailbox = ray.get_actor(peer.actor_name, namespace=NAMESPACE)
            reference = getattr(peer.mailbox, method).remote(*arguments)
            return _answer(reference, seconds_left(deadline), what)
        except ValueError as error:  # what get_actor raises
            raise TransportError(f"{what}: there is no such endpoint") from error
        finally:
            peer.lock.release()

    def poll(self, timeout: float) -> Events:
        self._check_open()
        left = seconds_left(deadline_after(timeout))
        if self._taking is None:
            self._taking = self._mailbox.take.remote(left)
        # If the answer is late it is kept for the next poll: what it carries exists only once.
        items = _answer(self._taking, left + _ANSWER, f"{self.name}: own mailbox")
        self._taking = None
        events = Events()
        for item in items:
            self._sort(item, events)
        return events

    def _sort(self, item: Item, events: Events) -> None:
        peer = self._peers.get(item.sender) or RayPeer(item.sender)
        peer = self._peers.setdefault(item.sender, peer)
        if isinstance(item.value, bytes):
            events.messages.append((peer, item.value))
        elif item.parcel is None or self._unpack(item.parcel):
            events.notices.append((peer, item.value))
        else:
            self.dropped += 1

    def _unpack(self, parcel: Parcel) -> bool:
        region = self._regions.get(parcel.region)
        if region is None:
            return False
        count = len(parcel.offsets)
        _native.copy_ranges(
            region.buffer,
            parcel.offsets,
            parcel.data,
            np.arange(count, dtype=np.int64) * parcel.length,
            parcel.length,
            np.repeat(np.arange(count, dtype=np.int32)[:, None], 2, axis=1),
        )
        return True

    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Nothing is to be done: what was delivered comes, whole, before anything sent later."""

    def close(self) -> None:
        if self._closed or is_forked(self._owner):
            return
        self._closed = True
        for region in list(self._regions.values()):
            region.close()
        if ray.is_initialized():
            with contextlib.suppress(TransportError):  # it may be dead, and is to be killed anyhow
                _answer(self._mailbox.shut.remote(), _ANSWER, f"{self.name}: own mailbox")
            ray.kill(self._mailbox)

    def _check_open(self) -> None:
        if self._closed:
            raise TransportError(f"the endpoint {self.name} is closed")


def _pack(ranges: RayRanges, index: npt.NDArray[np.int32]) -> Parcel:
    count = len(index)
    data = np.empty(count * ranges.length, dtype=np.uint8)
    pairs = np.stack([index[:, 0], np.arange(count, dtype=np.int32)], axis=1)
    _native.copy_ranges(
        data,
        np.arange(count, dtype=np.int64) * ranges.length,
        ranges.source,
        ranges.source_offsets,
        ranges.length,
        np.ascontiguousarray(pairs),
    )
    return Parcel(ranges.target, ranges.target_offsets[index[:, 1]], ranges.length, data)
