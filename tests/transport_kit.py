"""What tests of transports share: a way from one endpoint to another, and polling until it came."""

from __future__ import annotations

import os
import time

import numpy as np

from cloverinfer.transport import Endpoint, Events, Ranges, Region, Slices

PATIENCE = 30.0
"""Seconds after which a test gives up; never what it expects."""


def segments() -> list[str]:
    return [
        name for name in os.listdir("/dev/shm") if name.startswith(f"cloverinfer-{os.getpid()}-")
    ]


def collect(endpoint: Endpoint, notices: int = 0, messages: int = 0) -> Events:
    """Polls until at least so many have come."""
    seen = Events()
    end = time.monotonic() + PATIENCE
    while len(seen.notices) < notices or len(seen.messages) < messages:
        assert time.monotonic() < end, f"{len(seen.notices)}, {len(seen.messages)} came"
        events = endpoint.poll(1.0)
        seen.notices += events.notices
        seen.messages += events.messages
        assert events.tickets == []
    return seen


def array(region: Region) -> np.ndarray:
    return np.frombuffer(region.buffer, np.uint8)


def rows(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, np.int32).reshape(-1, 2)


def offsets(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


class Way:
    """From one endpoint to another: connected, a region on both sides, whole-region slices."""

    def __init__(self, sender: Endpoint, receiver: Endpoint, nbytes: int, length: int = 0) -> None:
        self.sender, self.receiver = sender, receiver
        self.source, self.target = sender.register(nbytes), receiver.register(nbytes)
        self.peer = sender.connect(receiver.address())
        self.ranges = self.cut(np.arange(0, nbytes, length or nbytes), length or nbytes)

    def cut(self, at: np.ndarray, length: int) -> Ranges:
        local = Slices(self.source, at.astype(np.int64), length)
        remote = Slices(self.target.ref, at.astype(np.int64), length)
        return self.sender.prepare(self.peer, local, remote)

    def put(self, notice: int, index: np.ndarray | None = None) -> None:
        ticket = self.sender.put(self.ranges, rows((0, 0)) if index is None else index, notice)
        assert ticket.done
        assert ticket.error is None

    def expect(self, want: np.ndarray) -> None:
        """The target holds ``want``, or zeroes with a transport that moves nothing."""
        if self.receiver.capabilities.moves_data:
            assert np.array_equal(array(self.target), want)
        else:
            assert not array(self.target).any()
