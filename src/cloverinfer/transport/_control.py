"""What a transport whose data plane only moves bytes says over another one: notices, messages, and
questions that the peer's own thread answers, whether or not its owner polls.

Owns the inner endpoint and two threads: one reads all that comes, the other answers questions (an
answer may have to wait; reading must not). Does not know what a question means.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

from ..core.errors import CloverError, DeadlineError, TransportError
from ._shared import seconds_left
from .base import Endpoint, Peer

NOTICE, MESSAGE = 1, 2
_WAKE, _PING, _ASK, _ANSWER, _REFUSAL = 3, 4, 5, 6, 7
_HEADER = struct.Struct("<BI")
"""Kind; and the notice, or the number of the question."""
OVERHEAD = _HEADER.size
"""Bytes by which a message grows on the inner endpoint."""

_SLICE = 0.25
"""Seconds of waiting for an answer after which it is seen again whether the peer lives."""
_LONGEST_POLL = 5.0
_IDLE = 60.0
"""Seconds for which the answering thread sleeps at a time; only so that it has a timeout."""
_MOST_UNREAD = 100_000
"""Notices and messages that wait for ``Control.take``; beyond them nothing more is read."""
_ENDING = 10.0
"""Seconds that each thread has to end."""

_log = logging.getLogger(__name__)


class Control:
    """``answer(peer, question)`` runs on a thread of its own; a ``CloverError`` that it raises is
    what the peer's ``ask`` raises as ``TransportError``.
    """

    def __init__(self, inner: Endpoint, answer: Callable[[Peer, bytes], bytes]) -> None:
        self.inner = inner
        self.dropped = 0
        """Records that made no sense."""
        self._answer = answer
        self._arrived: queue.SimpleQueue[tuple[Peer, int | bytes]] = queue.SimpleQueue()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._questions: queue.SimpleQueue[tuple[Peer, int, bytes] | None] = queue.SimpleQueue()
        self._asked: dict[int, tuple[str, Future[bytes]]] = {}
        self._lock = threading.Lock()
        self._numbers = 0
        self._ending = threading.Event()
        self._own = inner.connect(inner.address())
        self._threads = [
            threading.Thread(target=run, daemon=True, name=f"nixl-{what}")
            for what, run in (("read", self._read), ("answer", self._answer_all))
        ]
        for thread in self._threads:
            thread.start()

    def connect(self, address: str, deadline: float) -> Peer:
        """The inner peer; made on the reading thread, as the inner endpoint wants it."""
        made: Future[Peer] = Future()

        def run() -> None:
            try:
                made.set_result(self.inner.connect(address, seconds_left(deadline)))
            except CloverError as error:
                made.set_exception(error)

        self._calls.put(run)
        self._wake()
        try:
            return made.result(seconds_left(deadline) + _SLICE)
        except FutureTimeoutError as error:
            raise DeadlineError(f"no connection to {address} in time") from error

    def send(self, peer: Peer, kind: int, value: int, payload: bytes, deadline: float) -> None:
        """A notice (``value``) or a message (``payload``); arrive in the order they are sent."""
        self.inner.send(peer, _HEADER.pack(kind, value) + payload, seconds_left(deadline))

    def ask(self, peer: Peer, question: bytes, deadline: float) -> bytes:
        """The peer's answer; ``TransportError`` once it is gone, or when it refuses."""
        answer: Future[bytes] = Future()
        with self._lock:
            self._numbers = (self._numbers + 1) % (1 << 32)
            number = self._numbers
            self._asked[number] = (peer.address, answer)
        try:
            self.send(peer, _ASK, number, question, deadline)
            while True:
                try:
                    return answer.result(min(seconds_left(deadline), _SLICE))
                except FutureTimeoutError:
                    if seconds_left(deadline) <= 0:
                        raise DeadlineError(f"{peer.address} does not answer") from None
                    self.send(peer, _PING, 0, b"", deadline)
        finally:
            del self._asked[number]

    def take(self, timeout: float) -> list[tuple[Peer, int | bytes]]:
        """What has arrived, waiting for the first of it: a notice is a number, a message bytes."""
        try:
            taken = [self._arrived.get(timeout=timeout)]
        except queue.Empty:
            return []
        # What has arrived by now and no more: a fast sender must not keep us here.
        taken += [self._arrived.get_nowait() for _ in range(self._arrived.qsize())]
        return taken

    def _wake(self) -> None:
        self.inner.send(self._own, _HEADER.pack(_WAKE, 0))

    def _read(self) -> None:
        """The reading thread: the only one that polls the inner endpoint, connects and closes."""
        while not self._ending.is_set():
            while not self._calls.empty():
                self._calls.get_nowait()()
            if self._arrived.qsize() >= _MOST_UNREAD:
                self._ending.wait(0.005)
                continue
            for peer, record in self.inner.poll(_LONGEST_POLL).messages:
                self._sort(peer, record)
        self.inner.close()

    def _sort(self, peer: Peer, record: bytes) -> None:
        if len(record) < OVERHEAD:
            self.dropped += 1
            return
        kind, value = _HEADER.unpack_from(record)
        if kind == NOTICE:
            self._arrived.put((peer, value))
        elif kind == MESSAGE:
            self._arrived.put((peer, record[OVERHEAD:]))
        elif kind == _ASK:
            self._questions.put((peer, value, record[OVERHEAD:]))
        elif kind in (_ANSWER, _REFUSAL):
            self._resolve(peer, kind, value, record[OVERHEAD:])
        elif kind not in (_WAKE, _PING):
            self.dropped += 1

    def _resolve(self, peer: Peer, kind: int, number: int, payload: bytes) -> None:
        address, answer = self._asked.get(number, ("", None))
        if answer is None or address != peer.address or answer.done():
            self.dropped += 1  # too late, or not asked
        elif kind == _ANSWER:
            answer.set_result(payload)
        else:
            answer.set_exception(TransportError(payload.decode("utf-8", "replace")))

    def _answer_all(self) -> None:
        while not self._ending.is_set():
            try:
                item = self._questions.get(timeout=_IDLE)
            except queue.Empty:
                continue
            if item is None:
                return
            peer, number, question = item
            try:
                kind, payload = _ANSWER, self._answer(peer, question)
            except CloverError as error:
                kind, payload = _REFUSAL, str(error).encode()
            try:
                self.inner.send(peer, _HEADER.pack(kind, number) + payload)
            except TransportError as error:
                _log.debug("no answer to %s: %s", peer.address, error)

    def close(self) -> None:
        """Ends both threads and closes the inner endpoint; calling it twice is fine."""
        if self._ending.is_set():
            return
        self._ending.set()
        self._questions.put(None)
        # The reading thread may have seen it by itself, and be gone.
        with contextlib.suppress(TransportError):
            self._wake()
        for thread in self._threads:
            thread.join(_ENDING)
