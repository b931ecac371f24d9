"""The transport that moves no bytes and records every call, for tests of what stands above it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..config.network import NetworkConfig
from ._shared import MAX_MESSAGE_BYTES, check_index
from .base import (
    DEFAULT_TIMEOUT,
    Capabilities,
    DeviceMemory,
    Events,
    Peer,
    Ranges,
    Region,
    Slices,
    Ticket,
)
from .inproc import InprocEndpoint, InprocRanges

MOST_CALLS = 100_000
"""The oldest calls beyond these are forgotten, so that long runs stay small."""


def missing() -> str:
    """See ``transport.base``: a process can always reach itself."""
    return ""


class Call(NamedTuple):
    """One call of an endpoint's verb, with its arguments by name."""

    verb: str
    arguments: dict[str, Any]


class NullEndpoint(InprocEndpoint):
    """Notices and messages arrive as with ``inproc``; the bytes of puts stay where they are."""

    capabilities = Capabilities(
        name="null",
        cross_process=False,
        cross_host=False,
        puts_into_any_memory=True,
        max_message_bytes=MAX_MESSAGE_BYTES,
        moves_data=False,
    )

    def __init__(self, name: str, network: NetworkConfig | None = None) -> None:
        super().__init__(name, network)
        self.calls: deque[Call] = deque(maxlen=MOST_CALLS)

    def native(self) -> None:
        """None: every call is to be recorded."""

    def address(self) -> str:
        self._record("address")
        return super().address()

    def register(self, memory: int | memoryview | DeviceMemory) -> Region:
        self._record("register", memory=memory)
        return super().register(memory)

    def connect(self, address: str, timeout: float = DEFAULT_TIMEOUT) -> Peer:
        self._record("connect", address=address, timeout=timeout)
        return super().connect(address, timeout)

    def prepare(self, peer: Peer, local: Slices, remote: Slices) -> Ranges:
        self._record("prepare", peer=peer, local=local, remote=remote)
        return super().prepare(peer, local, remote)

    def put(
        self,
        ranges: Ranges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float = DEFAULT_TIMEOUT,
        after: int | None = None,
    ) -> Ticket:
        # A copy of the index: callers may use the array again for the next put.
        self._record("put", ranges=ranges, index=np.array(index), notice=notice, timeout=timeout)
        return super().put(ranges, index, notice, timeout)

    def _copy(self, ranges: InprocRanges, target: memoryview, index: npt.NDArray[np.int32]) -> None:
        check_index(ranges, index)

    def send(self, peer: Peer, message: bytes, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._record("send", peer=peer, message=message, timeout=timeout)
        super().send(peer, message, timeout)

    def poll(self, timeout: float) -> Events:
        self._record("poll", timeout=timeout)
        return super().poll(timeout)

    def close(self) -> None:
        self._record("close")
        super().close()

    def _record(self, verb: str, **arguments: Any) -> None:
        self.calls.append(Call(verb, arguments))
