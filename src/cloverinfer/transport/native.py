"""What a transport offers to loops without Python beside ``Endpoint``: its own ways of a hop.

It knows peers and where their memory is, not what is put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .. import _native
from .base import Peer, Ranges

if TYPE_CHECKING:
    from .shm import ShmEndpoint


def address_of(buffer: memoryview) -> int:
    """Of its first byte; good for as long as the buffer lives."""
    return int(np.frombuffer(buffer, dtype=np.uint8).ctypes.data)


class NearWire:
    """Ends in one process: one may leave a handle, which the others use in their own threads."""

    def __init__(self, find: Callable[[Peer], NearWire | None]) -> None:
        self._find = find
        self._offered: object | None = None

    def offer(self, handle: object) -> None:
        self._offered = handle

    def offered_by(self, peer: Peer) -> object | None:
        """None where the peer is gone, or offers nothing."""
        wire = self._find(peer)
        return wire._offered if wire is not None else None


class MailboxWire:
    """Ends that share memory: rows are copied, then a notice is put into the peer's mailbox, in the
    order of all that ``put`` and ``send`` put there."""

    def __init__(self, endpoint: ShmEndpoint, reader: _native.MailboxReader) -> None:
        self._endpoint = endpoint
        self.reader = reader

    def rings_of(self, peer: Peer) -> list[int]:
        """By which the peer's notices come; empty where none is known yet."""
        return self._endpoint.rings_of(peer)

    def writer_to(self, peer: Peer) -> _native.MailboxWriter | None:
        """None where there is no open way to the peer."""
        return self._endpoint.writer_to(peer)

    def first_target(self, ranges: Ranges) -> int:
        """Address, in this process, of the first remote slice of ``ranges``."""
        return self._endpoint.first_target(ranges)
