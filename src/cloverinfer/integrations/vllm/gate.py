"""Lets others write into blocks only once this engine's device has done with them.

An engine gives blocks to a load while its device may still be computing steps that name them for
the request before: a step behind, or one begun in advance. What it does itself comes after that on
its stream; what peers write does not. Which blocks, and who writes, is not known here.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from ...nodes.copies import Moment

log = logging.getLogger(__name__)
IDLE_SECONDS = 60.0
STOP_SECONDS = 5.0
PATIENCE = 600.0
"""Seconds for which the device may compute what it was asked for before."""
NAP = 200e-6
"""Seconds between two looks at the device: steps take longer, and the engine's thread computes."""


class Gate:
    """Does things in the order in which they are asked for, each after a moment of the device."""

    def __init__(self, mark: Callable[[], Moment], waits: bool) -> None:
        """``mark``: the moment at which all that the calling thread has asked for is done;
        ``waits``: whether that is ever later than now."""
        self._mark = mark
        self._work: queue.SimpleQueue[tuple[Moment, Callable[[], None]] | None]
        self._work = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if waits:
            self._thread = threading.Thread(target=self._run, name="kv-gate", daemon=True)
            self._thread.start()

    def pass_on(self, act: Callable[[], None]) -> None:
        """From the engine's thread."""
        if self._thread is None:
            act()
        else:
            self._work.put((self._mark(), act))

    def close(self) -> None:
        """What has not been done is dropped."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        while True:
            try:
                work = self._work.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                continue
            if work is None:
                return
            self._pass(*work)

    def _pass(self, moment: Moment, act: Callable[[], None]) -> None:
        try:
            moment.wait(PATIENCE, lambda: time.sleep(NAP))
            act()
        except Exception:  # a mistake of ours must not end the thread, nor a device the process
            log.exception("the KV gate failed at one thing and goes on")
