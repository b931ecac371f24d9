"""A device for tests without one: host memory that the node's copies reach late and in order.

What a copy writes is garbage until it is done, and what it reads is read when it is done, as on a
real device; computing that must come after a copy (``Copies.follow``) waits in the backend.
"""

from __future__ import annotations

import queue
import threading
import time

import torch

from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.nodes.copies import NOW, Copies, Moment

_thread = threading.local()


class LateMoment(Moment):
    def __init__(self):
        self.event = threading.Event()
        self.error = None

    @property
    def happened(self):
        if self.error is not None:
            raise self.error
        return self.event.is_set()


class LateCopies(Copies):
    """``delay``: seconds that each copy takes; nothing moves while ``going`` is not set; copies
    fail from the one called ``breaks_at`` on."""

    apart = True
    delay = 0.002
    breaks_at = None

    def __init__(self, torch_device=None):
        super().__init__(torch_device or torch.device("cpu"))
        self.going = threading.Event()
        self.going.set()
        self.copied = 0
        self._work = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while (item := self._work.get(timeout=600)) is not None:
            act, moment = item
            self.going.wait(60)
            time.sleep(self.delay)
            self.copied += 1
            if self.breaks_at is not None and self.copied >= self.breaks_at:
                moment.error = RuntimeError("CUDA error: an illegal memory access")
                continue
            try:
                with torch.inference_mode():
                    act()
            except Exception as problem:  # whoever looks at the moment has it
                moment.error = problem
            moment.event.set()

    def _ask(self, act):
        moment = LateMoment()
        self._work.put((act, moment))
        return moment

    def mark(self):
        return self._ask(lambda: None)

    def follow(self, moment):
        _thread.followed = [*getattr(_thread, "followed", []), moment]

    def copy(self, target, source):
        _spoil(target)
        return self._ask(lambda: target.copy_(source))

    def fetch(self, targets, rows, index, after):
        for target in targets:
            _spoil(target)
        real = Copies(self.torch)

        def act():
            after.wait(60)
            real.fetch(targets, rows, index, NOW)

        return self._ask(act)

    def store(self, rows, index, sources):
        _spoil(rows[index.tolist()])
        real = Copies(self.torch)
        return self._ask(lambda: real.store(rows, index, sources))

    def scatter(self, views, values, at):
        real, kept = Copies(self.torch), [value.clone() for value in values]
        return self._ask(lambda: real.scatter(views, kept, at))

    def close(self):
        self._work.put(None)
        self._thread.join(60)


class OrderedAttention(CpuAttention):
    """Computes once what it must follow is done, as a stream would."""

    def append(self, *args):
        _wait()
        super().append(*args)

    def attend(self, *args):
        _wait()
        return super().attend(*args)


def _wait():
    for moment in getattr(_thread, "followed", []):
        moment.wait(60)
    _thread.followed = []


def _spoil(target):
    target.view(torch.uint8).fill_(0xFF)
