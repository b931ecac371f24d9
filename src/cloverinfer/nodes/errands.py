"""A thread that does things for others, one after the other.

What they are, and who waits for them, is for those who ask.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)
IDLE_SECONDS = 60.0
"""How long the thread sleeps at a time while there is nothing to do."""
STOP_SECONDS = 5.0
"""How long closing waits for what is being done."""


class Errands:
    """Does what it is asked for in that order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, act: Callable[[], None]) -> None:
        """From any thread."""
        self._work.put(act)

    def close(self) -> None:
        """Ends the thread once what it is doing has ended; what was not begun is dropped."""
        self._ending.set()
        self._work.put(None)
        self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            log.warning("%s did not end within %g s", self._thread.name, STOP_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                act = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                continue
            if act is None or self._ending.is_set():
                return
            try:
                act()
            except Exception:  # a mistake of ours must not end a thread that others wait for
                log.exception("%s failed at one thing and goes on", self._thread.name)
