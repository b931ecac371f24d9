"""An in-process wire whose puts end later, in order to each peer, from threads of its own."""

from __future__ import annotations

import queue
import threading
import time
from typing import ClassVar

from cloverinfer.core.errors import TransportError
from cloverinfer.transport.base import DEFAULT_TIMEOUT, Ticket
from cloverinfer.transport.inproc import InprocEndpoint


class LateEndpoint(InprocEndpoint):
    """Reads local memory, and writes remote memory, after ``put`` returned: on prefill nodes
    ``delay`` seconds later, by when the next prompt could have been computed."""

    delay = 0.03
    refuse_from: int | None = None
    """Puts from this one on fail instead."""
    made: ClassVar[list[LateEndpoint]] = []

    def __init__(self, name, network=None):
        super().__init__(name, network)
        self._lines = {}
        self._lines_lock = threading.Lock()
        self._finished = queue.SimpleQueue()
        self.puts = 0
        self.made.append(self)

    def native(self):
        return None

    def put(self, ranges, index, notice, timeout=DEFAULT_TIMEOUT, after=None):
        ticket = Ticket()
        self.puts += 1
        bad = self.refuse_from is not None and self.puts > self.refuse_from
        self._line(ranges.peer).put((ticket, bad, ranges, index.copy(), notice))
        return ticket

    def send(self, peer, message, timeout=DEFAULT_TIMEOUT):
        self._open_endpoint(peer)
        self._line(peer).put((None, False, peer, message, 0))

    def _line(self, peer):
        """The queue of what is on its way to ``peer``."""
        with self._lines_lock:
            if peer.address not in self._lines:
                work = queue.SimpleQueue()
                thread = threading.Thread(target=self._run, args=(work,), daemon=True)
                self._lines[peer.address] = work, thread
                thread.start()
            return self._lines[peer.address][0]

    def _run(self, work):
        while (item := work.get(timeout=600)) is not None:
            ticket = item[0]
            try:
                self._do(*item)
            except TransportError as problem:
                if ticket is not None:
                    ticket.error = problem
            if ticket is not None:
                ticket.done = True
                self._finished.put(ticket)
                self._inbox.put((self._address, b""))  # ends a poll under way

    def _do(self, ticket, bad, what, payload, notice):
        if ticket is None:
            super().send(what, payload)
            return
        time.sleep(self.delay if self.name.startswith("prefill") else 0.0)
        if bad:
            raise TransportError("the wire is cut")
        super().put(what, payload, notice)

    def poll(self, timeout):
        events = super().poll(timeout)
        while not self._finished.empty():
            events.tickets.append(self._finished.get())
        return events

    def close(self):
        for work, thread in self._lines.values():
            work.put(None)
            thread.join(60)
        super().close()
