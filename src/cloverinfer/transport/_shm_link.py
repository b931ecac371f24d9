"""The sending end of a connection over shared memory: one ring into the peer's mailbox.

Who owns what: the ring's segment is made here but bears the *receiver's* prefix, for what is in it
belongs to the receiver: it outlives the sender, is unlinked by the receiver as soon as it has
mapped it, and is removed with the receiver's other segments if the receiver dies.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import deque

from .. import _native
from ..core.errors import DeadlineError, TransportError
from ._shared import seconds_left
from ._shm_files import create_segment, open_segment, publish, start_time, unlink

NOTICE, MESSAGE, SPILLED = _native.MAILBOX_NOTICE, 2, 3
"""Kinds of record. A notice is the record's value; a message its payload; the payload of a spilled
message names the segment that holds it, which the receiver unlinks."""

RING_BYTES = 512 << 10
"""Records of one ring, with their header page: 32 thousand notices."""
INLINE_BYTES = 64 << 10
"""Longer messages travel in segments of their own, so that one never waits for itself."""
MOST_SPILLED = 8
"""Unread spilled messages of one sender; further ones wait."""
SLICE = 0.05
"""Seconds of waiting after which it is seen again whether the peer lives."""
ALIVE_FOR = 0.01
"""Seconds for which a peer that was seen alive is taken to be alive."""


class Link:
    """Made by connecting; ``TransportError`` where there is no live endpoint with this prefix.

    Not thread-safe: the endpoint has one lock per peer.
    """

    def __init__(self, own_address: str, prefix: str) -> None:
        self._prefix = prefix
        mailbox = open_segment(f"{prefix}-mailbox")
        self._pid, self._started = _native.mailbox_owner(mailbox)
        self._seen_alive = float("-inf")
        self._spilled: deque[int] = deque()
        token = secrets.token_hex(6)
        self._ring_name = f"{prefix}-r{token}"
        self._check_process()
        unfinished = f"{prefix}-t{token}"
        ring = self.ring = create_segment(unfinished, RING_BYTES)
        try:
            _native.format_ring(ring, own_address)
            publish(unfinished, self._ring_name)
            self._writer = _native.MailboxWriter(mailbox, ring)
            self._writer.announce()
            # After publishing: an endpoint that closes says so first and then looks for names, so
            # that either it finds ours or we find it closed.
            self.check_alive()
        except TransportError:
            unlink(unfinished)
            unlink(self._ring_name)
            raise

    def check_alive(self) -> None:
        """``TransportError`` if the peer has closed or its process has ended."""
        if self._writer.peer_closed:
            raise TransportError("the peer has closed its endpoint")
        self._check_process()

    @property
    def peer_lives(self) -> bool:
        return not self._writer.peer_closed and start_time(self._pid) == self._started

    def _check_process(self) -> None:
        now = time.monotonic()
        if now - self._seen_alive <= ALIVE_FOR:
            return
        if self._pid != os.getpid() and start_time(self._pid) != self._started:
            raise TransportError(f"the peer's process {self._pid} has ended")
        self._seen_alive = now

    @property
    def writer(self) -> _native.MailboxWriter:
        """Of the ring; good for notices from any thread."""
        return self._writer

    def push(self, kind: int, value: int, payload: bytes, deadline: float) -> None:
        """One record into the ring; waits for room as long as the peer lives."""
        while True:
            self.check_alive()
            left = seconds_left(deadline)
            if self._writer.push(kind, value, payload, min(left, SLICE)):
                return
            if left <= 0:
                raise DeadlineError("the peer's mailbox is full and it does not read")

    def send(self, message: bytes, deadline: float) -> None:
        if len(message) <= INLINE_BYTES:
            self.push(MESSAGE, 0, message, deadline)
        else:
            self._spill(message, deadline)

    def _spill(self, message: bytes, deadline: float) -> None:
        self._wait_for_spilled(deadline)
        what = f"m{secrets.token_hex(8)}"
        name = f"{self._prefix}-{what}"
        segment = create_segment(name, len(message))
        try:
            segment[:] = message
            self.push(SPILLED, len(message), what.encode(), deadline)
        except TransportError:
            unlink(name)
            raise
        self._spilled.append(self._writer.position)

    def _wait_for_spilled(self, deadline: float) -> None:
        while self._spilled:
            self.check_alive()
            left = seconds_left(deadline) if len(self._spilled) >= MOST_SPILLED else 0.0
            if self._writer.wait_consumed(self._spilled[0], min(left, SLICE)):
                self._spilled.popleft()
            elif len(self._spilled) < MOST_SPILLED:
                return
            elif left <= 0:
                raise DeadlineError(f"the peer has {MOST_SPILLED} large messages to read")

    def close(self) -> None:
        """What was sent stays to be read, unless nobody lives to read it."""
        self._writer.close()
        if start_time(self._pid) != self._started:
            unlink(self._ring_name)
