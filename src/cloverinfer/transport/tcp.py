"""Endpoints over sockets: any two hosts that reach each other.

Each direction between two endpoints is a link: ``network.tcp_streams`` connections that the sender
dials and keeps. A native engine moves the bytes: scattered pieces are written from where they lie
and read to where they belong. What notices and messages mean is not known here.

A ticket is done once the peer has answered that all bytes are in its memory, so a put that is done
has been written, and one that failed for its region was not announced. A put that misses its
deadline after some of it went out ends its link, as the only way to be sure that no more of it
arrives; everything pending on the link fails with it, and so do later puts until ``connect`` makes
a new one: nothing that was lost is passed over in silence. ``Region.close`` returns once nothing
writes to the region any more.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .. import _native
from ..config.network import NetworkConfig
from ..core.errors import TransportError
from ._linked import LinkedEndpoint, LinkRanges
from ._shared import (
    MAX_MESSAGE_BYTES,
    check_no_event,
    check_region_open,
    checked_notice,
    deadline_after,
    index_array,
    seconds_left,
)
from ._tcp_address import whoever_listens
from ._tcp_meet import Hello
from .base import DEFAULT_TIMEOUT, Capabilities, Peer, Put, RegionRef, Slices, Ticket

__all__ = ["TcpEndpoint", "missing", "whoever_listens"]

MOST_LOOPS = 4
"""Threads of one endpoint that move bytes."""


def missing() -> str:
    """See ``transport.base``: every host has sockets."""
    return ""


class TcpRanges(LinkRanges):
    """Keeps offsets and memory where native code reads them."""

    def __init__(self, peer: Peer, local: Slices, remote: Slices, region: int) -> None:
        super().__init__(peer, local, remote)
        assert isinstance(remote.region, RegionRef)
        self.native = _native.TcpRanges(
            self.source,
            self.source_offsets,
            region,
            remote.region.nbytes,
            self.target_offsets,
            self.length,
        )


class TcpEndpoint(LinkedEndpoint):
    """See ``Endpoint`` and the head of this module."""

    capabilities = Capabilities(
        name="tcp",
        cross_process=True,
        cross_host=True,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
    )
    _engine: _native.TcpEngine

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        network = network or NetworkConfig()
        super().__init__(name, network, network.tcp_streams)

    def _start(self, network: NetworkConfig) -> None:
        self._engine = _native.TcpEngine(_loops(network.tcp_streams))

    def _add_outgoing(self, sockets: list[int], deadline: float) -> int:
        return self._engine.add_outgoing(sockets)

    def _add_incoming(self, hello: Hello, sock: int) -> int:
        return self._engine.add_incoming(hello.link, hello.stream == 0, sock)

    def _fence(self, link: int, timeout: float) -> bool:
        return self._engine.fence_incoming(link, timeout)

    def _make_ranges(self, peer: Peer, local: Slices, remote: Slices, region: int) -> TcpRanges:
        return TcpRanges(peer, local, remote, region)

    def put_many(
        self, puts: Sequence[Put], timeout: float = DEFAULT_TIMEOUT, after: int | None = None
    ) -> list[Ticket]:
        """By one native call, during which other threads run. What that does not do, and why, is
        for ``put`` to say."""
        begun = self._begin_many(puts, deadline_after(timeout)) if puts and after is None else []
        return begun + super().put_many(puts[len(begun) :], timeout, after)

    def _begin_many(self, puts: Sequence[Put], deadline: float) -> list[Ticket]:
        """Tickets of the first that could be begun."""
        self._check_open()
        parts, tickets = [], []
        try:
            link = self._link(puts[0].ranges.peer, deadline)
            for put in puts:
                ranges = put.ranges
                assert isinstance(ranges, TcpRanges)
                check_region_open(ranges.region)
                number, ticket = next(self._numbers), Ticket()
                part = number, ranges.native, index_array(put.index), checked_notice(put.notice)
                self._pending[number] = ticket, ranges
                parts.append(part)
                tickets.append(ticket)
        except (TransportError, ValueError):
            if not parts:
                return []
        begun = self._engine.put_many(link, parts, seconds_left(deadline))
        for number, *_ in parts[begun:]:
            del self._pending[number]
        return tickets[:begun]

    def _await(self, after: int | None, deadline: float) -> None:
        check_no_event(after)


def _loops(streams: int) -> int:
    """Threads that move bytes: half of the cores at most, as others compute."""
    return max(1, min(streams, MOST_LOOPS, len(os.sched_getaffinity(0)) // 2))
