"""What both sides of a check do alike: talk, and put with a look at whether the other lives."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from ..core.errors import DeadlineError, TransportError
from ..transport import Endpoint, Peer, Ranges, Region, RegionRef, Slices, Ticket
from .memory import make_memory
from .messages import Answer, Ask, pieces

STEP = 60.0
"""Seconds that one ask may take, and that the other side may be silent."""
NUDGE = 0.5
"""Seconds of waiting after which it is seen whether the other side lives."""
_encode = msgspec.msgpack.Encoder().encode
_T = TypeVar("_T", Ask, Answer)


class Control:
    """One side's end of the talk: whole messages, and empty ones, which only show that the other
    side can be reached. ``alive`` says whether its process runs, where that is known.
    """

    def __init__(
        self, endpoint: Endpoint, peer: Peer, alive: Callable[[], bool] = lambda: True
    ) -> None:
        self.endpoint, self.peer, self._alive = endpoint, peer, alive
        self._came: list[bytes] = []

    def say(self, message: Ask | Answer) -> None:
        self.endpoint.send(self.peer, _encode(message))

    def hear(self, kind: type[_T]) -> _T:
        """The next message; ``TransportError`` where the other side is gone or silent."""
        end = time.monotonic() + STEP
        while not self._came:
            if time.monotonic() > end:
                raise DeadlineError(f"the other side has said nothing for {STEP:.0f} s")
            if not self.look(NUDGE):
                self.check_alive()
        try:
            return msgspec.msgpack.decode(self._came.pop(0), type=kind)
        except msgspec.DecodeError as error:
            raise TransportError(
                f"the other side speaks another language: install the same CloverInfer ({error})"
            ) from error

    def look(self, timeout: float) -> bool:
        """Whether a message of the other side is there, or comes in time."""
        if not self._came:
            events = self.endpoint.poll(timeout)
            self._came += [text for sender, text in events.messages if sender is self.peer and text]
        return bool(self._came)

    def check_alive(self) -> None:
        """``TransportError`` if the other side is gone."""
        if not self._alive():
            raise TransportError("the other process has ended")
        self.endpoint.send(self.peer, b"")


class Data:
    """One side of a transport under check: its endpoint and region, and the way to the other's.
    ``device``: the GPU whose memory the region is; None: the host's."""

    def __init__(
        self, endpoint: Endpoint, nbytes: int, control: Control, device: int | None = None
    ) -> None:
        self.endpoint, self._control = endpoint, control
        self.memory = make_memory(endpoint, nbytes, device)
        self.region: Region = self.memory.region
        self._peer: Peer | None = None
        self._theirs: RegionRef | None = None
        self._notices: list[int] = []

    def meet(self, address: str, theirs: RegionRef) -> None:
        self._peer, self._theirs = self.endpoint.connect(address), theirs

    def way(self, nbytes: int, length: int) -> tuple[Ranges, npt.NDArray[np.int32]]:
        """``nbytes`` in pieces of ``length``, each to its own place in the other region."""
        assert self._peer is not None
        assert self._theirs is not None
        offsets, index = pieces(nbytes, length)
        local, remote = (Slices(region, offsets, length) for region in (self.region, self._theirs))
        return self.endpoint.prepare(self._peer, local, remote), index

    def close(self) -> None:
        """The endpoint first: then nobody reads or writes the memory."""
        self.endpoint.close()
        self.memory.close()

    def put(self, ranges: Ranges, index: npt.NDArray[np.int32], notice: int) -> Ticket:
        return self.endpoint.put(ranges, index, notice, timeout=STEP)

    def settle(self, ticket: Ticket) -> None:
        """Returns once the put is done; ``TransportError`` where it failed."""
        end = time.monotonic() + STEP
        while not ticket.done:
            self._poll(end, "a put is not done")
        if ticket.error is not None:
            raise ticket.error

    def notice(self) -> int:
        """The next notice."""
        end = time.monotonic() + STEP
        while not self._notices:
            self._poll(end, "no notice came")
        return self._notices.pop(0)

    def _poll(self, end: float, what: str) -> None:
        if time.monotonic() > end:
            raise DeadlineError(f"{what} within {STEP:.0f} s")
        events = self.endpoint.poll(NUDGE)
        self._notices += [notice for _, notice in events.notices]
        if not events:
            self._control.check_alive()
