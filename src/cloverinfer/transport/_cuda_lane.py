"""The way out of one device: a stream of its own, and what is under way on it.

A flight is a set of copies followed by the store of a number to a flag in pinned host memory, which
sender and receiver both see: nobody waits on the host for a copy to end. Copies run in the order of
flights. Who the flags belong to is not known here.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..core.errors import DeadlineError, TransportError
from ._cuda_driver import Driver
from ._cuda_pieces import PieceKernel
from ._shared import seconds_left
from .base import Ticket

Addresses = npt.NDArray[np.uint64]

FEW_PIECES = 2
"""Up to so many pieces, and from ``LARGE_PIECE`` bytes each, copy engines are as fast as the
kernel, and leave the multiprocessors to others. A piece of a batch takes them about 5 us."""
LARGE_PIECE = 16 << 20
_TABLE_ROWS = 1 << 16
_ROW_BYTES = 16
_MOST_ROWS = _TABLE_ROWS // 4
"""Rows of one launch: the next one's table is written while the first is read."""
_NAP = 20e-6
_LOOK_EVERY = 0.25
"""Seconds after which a flight that has not landed is looked at: the device may have failed."""
_HALF = 1 << 31


class Flag:
    """32 bits in pinned host memory that count flights of one lane to one peer, for ever."""

    def __init__(self, word: npt.NDArray[np.uint32], pointer: int) -> None:
        self.word = word
        self.pointer = pointer
        self.last = 0

    def next(self) -> int:
        self.last = (self.last + 1) % (1 << 32)
        return self.last


def reached(word: npt.NDArray[np.uint32], number: int) -> bool:
    """Whether a flag has come to a number, at most 2^31 flights ahead of it."""
    return (int(word[0]) - number) % (1 << 32) < _HALF


@dataclass(eq=False)
class Copies:
    """Pieces of ``length`` bytes; after an event (0: none). ``aligned``: all of them by 16.
    ``on_host``: both sides are host memory, between which the driver's own copies return only
    once they are done.
    """

    targets: Addresses
    sources: Addresses
    length: int
    aligned: bool = False
    after: int = 0
    on_host: bool = False


@dataclass(eq=False)
class Flight:
    flag: Flag
    number: int
    deadline: float
    ticket: Ticket | None
    """None for the first parts of a put that is flown in several."""
    rows: int = 0
    """Of the table, that are free once it has landed."""
    started: float = field(default_factory=time.monotonic)

    @property
    def landed(self) -> bool:
        return reached(self.flag.word, self.number)

    def end(self, error: TransportError | None) -> list[Ticket]:
        """The ticket, where it was not done before."""
        if self.ticket is None:
            return []
        self.ticket.late = not self.landed and isinstance(error, DeadlineError)
        if self.ticket.done:
            return []
        self.ticket.error = error
        self.ticket.done = True
        return [self.ticket]


def runs(copies: Copies) -> tuple[Addresses, Addresses, Addresses]:
    """Targets, sources and sizes, pieces that adjoin on both sides made one."""
    targets, sources, step = copies.targets, copies.sources, np.uint64(copies.length)
    apart = (targets[1:] != targets[:-1] + step) | (sources[1:] != sources[:-1] + step)
    first = np.concatenate([[0], np.flatnonzero(apart) + 1])
    counts = np.diff(np.append(first, len(targets)))
    return targets[first], sources[first], counts.astype(np.uint64) * step


class Lane:
    """``submit`` may be called from any thread, everything else from one."""

    def __init__(self, driver: Driver, device: int) -> None:
        self.driver = driver
        self.device = device
        self.context = driver.retain(device)
        self._lock = threading.Lock()
        self._flights: deque[Flight] = deque()
        self._table = mmap.mmap(-1, _TABLE_ROWS * _ROW_BYTES)
        self._rows = np.frombuffer(self._table, np.uint64).reshape(_TABLE_ROWS, 2)
        self._next_row, self._free_rows = 0, _TABLE_ROWS
        self._looked = 0.0
        with driver.current(self.context):
            self._stream = driver.make_stream()
            self._kernel = PieceKernel(driver)
            self._host_table = driver.pin(self._rows.ctypes.data, len(self._table))
            self._device_table = driver.make_memory(len(self._table))

    @property
    def flying(self) -> bool:
        return bool(self._flights)

    def submit(self, copies: Copies, flag: Flag, ticket: Ticket, deadline: float) -> Flight:
        """Starts the copies; the flag has the flight's number once they are done. ``DeadlineError``
        where too many are under way for too long.
        """
        if not self._lock.acquire(timeout=seconds_left(deadline)):
            raise DeadlineError("other threads keep the device's stream busy")
        try:
            with self.driver.current(self.context):
                if copies.after:
                    self.driver.wait_event(self._stream, copies.after)
                return self._start(copies, flag, ticket, deadline)
        finally:
            self._lock.release()

    def _start(self, copies: Copies, flag: Flag, ticket: Ticket, deadline: float) -> Flight:
        if not len(copies.targets) or not copies.length:
            return self._fly(Flight(flag, flag.next(), deadline, ticket))
        if self._engines_copy(copies):
            return self._fly(Flight(flag, flag.next(), deadline, ticket))
        for at in range(0, len(copies.targets), _MOST_ROWS):
            part = slice(at, at + _MOST_ROWS)
            last = at + _MOST_ROWS >= len(copies.targets)
            rows = self._launch(copies.targets[part], copies.sources[part], copies.length, deadline)
            flight = self._fly(
                Flight(flag, flag.next(), deadline, ticket if last else None, rows=rows)
            )
        return flight

    def _engines_copy(self, copies: Copies) -> bool:
        """Gives the copies to the copy engines, unless the kernel is better at them."""
        if copies.on_host and copies.aligned:
            return False
        if len(copies.targets) == 1:
            piece = int(copies.targets[0]), int(copies.sources[0]), copies.length
            self.driver.copy(self._stream, *piece)
            return True
        many = len(copies.targets) > FEW_PIECES and copies.length < LARGE_PIECE
        if many and copies.aligned:
            return False
        self.driver.copy_many(self._stream, *runs(copies))
        return True

    def _fly(self, flight: Flight) -> Flight:
        self.driver.write_flag(self._stream, flight.flag.pointer, flight.number)
        self._flights.append(flight)
        return flight

    def _launch(self, targets: Addresses, sources: Addresses, length: int, deadline: float) -> int:
        """Copies by the kernel; returns the rows of the table that this takes."""
        count = len(targets)
        skipped = _TABLE_ROWS - self._next_row if self._next_row + count > _TABLE_ROWS else 0
        self._wait_for_rows(count + skipped, deadline)
        begin = (self._next_row + skipped) % _TABLE_ROWS
        self._rows[begin : begin + count, 0] = targets
        self._rows[begin : begin + count, 1] = sources
        at, size = begin * _ROW_BYTES, count * _ROW_BYTES
        self.driver.copy(self._stream, self._device_table + at, self._host_table + at, size)
        self._kernel.launch(self._stream, self._device_table + at, count, length)
        self._next_row = begin + count
        self._free_rows -= count + skipped
        return count + skipped

    def _wait_for_rows(self, rows: int, deadline: float) -> None:
        while True:
            # Rows of flights that have landed but that nobody has asked for yet.
            landed = sum(flight.rows for flight in self._flights if flight.landed)
            if self._free_rows + landed >= rows:
                return
            if seconds_left(deadline) <= 0:
                raise DeadlineError("the device does not get on with its copies")
            self._look()
            time.sleep(_NAP)

    def landed(self) -> list[Ticket]:
        """Tickets that are done since the last call, in order."""
        with self._lock:
            error = self._failure()
            done = []
            while self._flights and (error or self._flights[0].landed):
                flight = self._flights.popleft()
                self._free_rows += flight.rows
                done += flight.end(None if flight.landed else error)
            # Their copies may still be running, so that these flights stay.
            late = [one for one in self._flights if seconds_left(one.deadline) <= 0]
            for flight in late:
                done += flight.end(DeadlineError("the device did not copy in time"))
            return done

    def _failure(self) -> TransportError | None:
        """What went wrong on the device since; asked only where a flight takes long."""
        now = time.monotonic()
        if not self._flights or now - max(self._looked, self._flights[0].started) < _LOOK_EVERY:
            return None
        self._looked = now
        try:
            self._look()
        except TransportError as error:
            return error
        return None

    def _look(self) -> None:
        with self.driver.current(self.context):
            self.driver.idle(self._stream)

    def drain(self, deadline: float) -> list[Ticket]:
        """Waits until all has landed, or failed; returns the tickets."""
        done = self.landed()
        while self._flights and seconds_left(deadline) > 0:
            time.sleep(_NAP)
            done += self.landed()
        return done

    def close(self) -> None:
        """The caller has drained it."""
        with self.driver.current(self.context):
            self.driver.destroy_stream(self._stream)
            self._kernel.close()
            self.driver.free_memory(self._device_table)
            self.driver.unpin(self._rows.ctypes.data)
        self.driver.release(self.device)
