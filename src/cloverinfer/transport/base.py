"""The contract of an endpoint: one verb, *put with notice*, and small messages.

Memory. ``register(nbytes)`` allocates memory that peers can write to; ``register(buffer)`` takes
the caller's memory, which must stay valid until ``Region.close()``. A region must stay open until
every put that names it has finished. Views of a closed region must not be used.

Order. From one endpoint to one peer, puts and messages arrive in the order they were made, and a
put's bytes are visible at the receiver before its notice is.

Threads. ``put`` and ``send`` may be called from any thread; everything else from one thread.

Availability. Each transport's module has ``missing() -> str``: why this host cannot use it, in
one sentence with what to do about it; empty where it can.

Failure. Nothing waits without a timeout. A put to a peer that is gone fails with
``TransportError`` (at once, or through its ticket) within its deadline.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from ..core.errors import TransportError

if TYPE_CHECKING:
    from .native import MailboxWire, NearWire

DEFAULT_TIMEOUT = 30.0
"""Seconds that a put or a connection may take where the caller does not say."""


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do; each field with its consequence."""

    name: str
    cross_process: bool
    """Peers may be in another process of this host; else only in this one."""
    cross_host: bool
    """Peers may be on another host."""
    puts_into_any_memory: bool
    """Peers can write to ``register(buffer)`` regions; else only to ``register(nbytes)`` ones."""
    max_message_bytes: int
    """A longer ``send`` is a ``TransportError``."""
    max_put_bytes: int = 1 << 40
    """A put of more bytes in all is a ``TransportError``."""
    memory: tuple[str, ...] = ("host",)
    """Kinds of memory that regions may be of: ``host``, ``cuda``; ``register`` refuses others."""
    moves_data: bool = True
    """False: notices and messages arrive, bytes of puts do not (the null transport)."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of an accelerator, owned by the caller."""

    pointer: int
    """Device address."""
    nbytes: int
    device: int
    """Index of the device in this process."""


class RegionRef(msgspec.Struct, frozen=True):
    """Names a region to peers; travels in messages."""

    address: str
    """Address of the endpoint that registered it."""
    name: str
    nbytes: int


class Region:
    """Registered memory: ``buffer`` is its memoryview of bytes (empty for device memory);
    ``ref`` names it to peers."""

    def __init__(self, ref: RegionRef, buffer: memoryview) -> None:
        self.ref = ref
        self.buffer = buffer

    def close(self) -> None:
        """Takes the region back; later puts into it fail. Calling it twice is fine."""


@dataclass(frozen=True)
class Slices:
    """Equal-sized pieces of a region: ``offsets`` (bytes, int64) and their common ``length``."""

    region: Region | RegionRef
    offsets: npt.NDArray[np.int64]
    length: int

    def __post_init__(self) -> None:
        if not isinstance(self.offsets, np.ndarray) or not isinstance(
            self.length, (int, np.integer)
        ):
            raise ValueError("slices have a numpy array of offsets and a whole number as length")
        size = self.region.nbytes if isinstance(self.region, RegionRef) else self.region.ref.nbytes
        if self.length < 0:
            raise ValueError(f"slices have a length of 0 or more, not {self.length}")
        # As Python's own numbers, which do not overflow.
        if self.offsets.size and (
            int(self.offsets.min()) < 0 or int(self.offsets.max()) + self.length > size
        ):
            raise ValueError(
                f"slices of {self.length} bytes reach outside a region of {size} bytes"
            )


class Peer:
    """The other end of a connection, the same object for its whole life."""

    def __init__(self, address: str) -> None:
        self.address = address


class Ranges:
    """What ``prepare`` made: local and remote slices of one peer, ready for index arrays."""

    def __init__(self, peer: Peer, local: Slices, remote: Slices) -> None:
        if local.length != remote.length:
            raise ValueError(f"slices differ in length: {local.length} and {remote.length} bytes")
        self.peer = peer
        self.local = local
        self.remote = remote


@dataclass(frozen=True, slots=True)
class Put:
    """One of several that are asked for together; see ``Endpoint.put``."""

    ranges: Ranges
    index: npt.NDArray[np.int32]
    notice: int


class Ticket:
    """A put under way. Once ``done``, ``error`` is None or what went wrong, and the sender neither
    reads local memory for it nor sends any more of it: except while ``late``, of a put that has
    missed its deadline and cannot be called back, as a device is copying."""

    __slots__ = ("done", "error", "late")

    def __init__(self, done: bool = False, error: Exception | None = None) -> None:
        self.done = done
        self.error = error
        self.late = False


@dataclass(slots=True)
class Events:
    """What ``poll`` saw, each list in order of arrival from each peer."""

    notices: list[tuple[Peer, int]] = field(default_factory=list)
    messages: list[tuple[Peer, bytes]] = field(default_factory=list)
    tickets: list[Ticket] = field(default_factory=list)
    """Tickets that were not done when ``put`` returned, and now are."""

    def __bool__(self) -> bool:
        return bool(self.notices or self.messages or self.tickets)


class Endpoint(ABC):
    """A node's end of the data plane. Made by ``create_endpoint``; ``close`` ends it."""

    capabilities: Capabilities

    @abstractmethod
    def address(self) -> str:
        """What peers pass to ``connect``: ``<transport>://...``."""

    @abstractmethod
    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        """Allocates that many bytes (zeroed, page-aligned), or takes the caller's memory.

        ``ValueError`` for a kind of memory that ``capabilities.memory`` does not name.
        """

    @abstractmethod
    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        """The peer at ``address`` (the endpoint's own address too); one ``Peer`` per address, the
        same that ``poll`` reports for what comes from there. ``TransportError`` if there is none.
        """

    @abstractmethod
    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        """Resolves slices once. ``local.region`` is a ``Region`` of this endpoint,
        ``remote.region`` a ``RegionRef`` of the peer's. ``ValueError`` when lengths differ.
        """

    @abstractmethod
    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        """Copies ``local[index[i, 0]]`` to ``remote[index[i, 1]]`` for each row of ``index``
        (int32 ``[n, 2]``, n may be 0), then gives the peer ``notice`` (0 to 2^32 - 1).

        The local memory may be reused once the ticket is done; a ticket that is done on return
        is not reported by ``poll``. ``after``: a CUDA event's handle; local memory is read once
        that event has happened (``ValueError`` where ``capabilities.memory`` has no ``cuda``).
        """

    def put_many(
        self, puts: Sequence[Put], timeout: float = DEFAULT_TIMEOUT, after: int | None = None
    ) -> list[Ticket]:
        """As ``put`` of each in turn, all of them to one peer, and a ticket for each. One that
        cannot be made is a ticket that is done with the reason as its error, and so are those
        after it, which are not tried.
        """
        tickets: list[Ticket] = []
        try:
            for each in puts:
                tickets.append(self.put(each.ranges, each.index, each.notice, timeout, after))
        except (TransportError, ValueError) as problem:
            tickets += [Ticket(True, problem) for _ in range(len(puts) - len(tickets))]
        return tickets

    @abstractmethod
    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Puts a small message into the peer's mailbox; ``TransportError`` if it cannot."""

    @abstractmethod
    def poll(self, timeout: float) -> Events:
        """What has arrived; waits up to ``timeout`` seconds (0: not at all) for the first of it,
        without using the processor.
        """

    @abstractmethod
    def fence(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Once it returns, nothing that the peer at ``address`` put before is written here any
        more. The peer need not live, nor ever have been connected to.

        What of it had arrived whole may still be polled; what had not is never written. It is meant
        for peers that are gone or whose puts have failed and ended: one that lives must ``connect``
        again before it can put. ``DeadlineError``: not yet, ask again. ``TransportError``: this
        wire cannot.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes regions and connections and removes every trace; calling it twice is fine.

        In a process that was forked off the endpoint's it does nothing: what is there is not its
        own.
        """

    def native(self) -> NearWire | MailboxWire | None:
        """The wire's own ways of a hop, for a layer loop without Python, which keeps what is said
        above of order and failure; None where it has none.
        """
        return None
