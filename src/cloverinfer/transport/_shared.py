"""What every transport checks and keeps in the same way; knows no wire."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from ..core.errors import TransportError
from ..core.memory import private_memory
from .base import DeviceMemory, Peer, Ranges, Region, RegionRef, Slices

MAX_MESSAGE_BYTES = 64 << 20
"""Far more than any plan; a longer message is a mistake of ours."""
MOST_REGION_BYTES = 1 << 62
"""Sizes beyond it fit no system call."""
LONGEST_WAIT = 1e6
"""Seconds; what "for ever" is cut down to, so that every primitive can take it."""
_INT32 = np.dtype(np.int32)


class OwnRegion(Region):
    """A region of this process's memory. Closing lets go of it; the memory itself is given back
    when the last array, and the last ``Ranges``, made from it is gone.
    """

    def __init__(
        self, ref: RegionRef, buffer: memoryview, on_close: Callable[[OwnRegion], None]
    ) -> None:
        super().__init__(ref, buffer)
        self._on_close: Callable[[OwnRegion], None] | None = on_close

    @property
    def closed(self) -> bool:
        return self._on_close is None

    def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            self.buffer = memoryview(b"")
            on_close(self)


class OffsetRanges(Ranges):
    """Ranges whose offsets are arrays that native code takes as they are."""

    def __init__(self, peer: Peer, local: Slices, remote: Slices) -> None:
        super().__init__(peer, local, remote)
        assert isinstance(local.region, OwnRegion)
        assert isinstance(remote.region, RegionRef)
        self.region = local.region
        self.source = local.region.buffer
        self.source_offsets = offset_array(local.offsets)
        self.target_offsets = offset_array(remote.offsets)

    @property
    def length(self) -> int:
        return self.local.length


def offset_array(offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A private copy, int64 and contiguous; ``ValueError`` for anything but integers."""
    array = np.asarray(offsets)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError("offsets must be a one-dimensional array of integers")
    return np.array(array, dtype=np.int64)


def index_array(index: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """``index`` as native code takes it; ``ValueError`` unless int32 ``[n, 2]``."""
    if not isinstance(index, np.ndarray) or index.dtype != _INT32:
        raise ValueError("index must be an int32 array")
    if index.ndim != 2 or index.shape[1] != 2:
        raise ValueError(f"index must have the shape [n, 2], not {list(index.shape)}")
    return np.ascontiguousarray(index)


def check_index(ranges: OffsetRanges, index: npt.NDArray[np.int32]) -> None:
    """``ValueError`` for a row that names no slice (native copies check it themselves)."""
    counts = (len(ranges.source_offsets), len(ranges.target_offsets))
    rows = index.view(np.uint32)  # what is negative becomes larger than any count
    if len(index) and (rows[:, 0].max() >= counts[0] or rows[:, 1].max() >= counts[1]):
        raise ValueError(f"an index row names no slice; there are {counts[0]} and {counts[1]}")


def check_put_bytes(ranges: Ranges, index: npt.NDArray[np.int32], limit: int) -> None:
    """``TransportError`` for a put of more bytes than ``Capabilities.max_put_bytes``."""
    nbytes = len(index) * ranges.local.length
    if nbytes > limit:
        raise TransportError(f"a put of {nbytes} bytes; at most {limit} can be put at once")


def checked_notice(notice: int) -> int:
    """``notice`` as Python's own number, whichever library's integer it was; ``ValueError`` for
    what is no notice."""
    if type(notice) is int and 0 <= notice < 1 << 32:
        return notice
    if not hasattr(notice, "__index__") or not 0 <= notice < 1 << 32:
        raise ValueError(f"a notice is 32 bits, from 0 to 2^32 - 1, not {notice}")
    return int(notice)


def check_no_event(after: int | None) -> None:
    if after is not None:
        raise ValueError("this transport knows no device events: after must be None")


def check_message(message: bytes, limit: int) -> None:
    if not isinstance(message, bytes):
        raise ValueError(f"a message is bytes, not {type(message).__name__}")
    if len(message) > limit:
        raise TransportError(f"a message of {len(message)} bytes; at most {limit} can be sent")


def check_prepare(address: str, peer: Peer, local: Slices, remote: Slices) -> None:
    """``ValueError`` unless ``local`` is a region of the endpoint at ``address`` and ``remote`` a
    reference to one of the peer's; ``TransportError`` for a closed local region.
    """
    if not isinstance(local.region, OwnRegion) or local.region.ref.address != address:
        raise ValueError("local slices must be of a Region that this endpoint registered")
    if not isinstance(remote.region, RegionRef) or remote.region.address != peer.address:
        raise ValueError(f"remote slices must be of a RegionRef of the peer {peer.address}")
    check_region_open(local.region)


def check_region_open(region: OwnRegion) -> None:
    if region.closed:
        raise TransportError(f"the local region {region.ref.name} is closed")


def allocate(nbytes: int) -> memoryview:
    """Zeroed, page-aligned memory of this process; of huge pages where the system has them for
    the asking, since blocks are read in random order."""
    check_size(nbytes)
    try:
        memory = private_memory(nbytes)
    except OSError as error:
        raise TransportError(
            f"this host does not give {nbytes} bytes of memory: {error}; configure smaller pools"
        ) from error
    return memoryview(memory)


def is_forked(owner: int) -> bool:
    """Whether this process is not ``owner``, in which an endpoint was made: here are copies of its
    sockets and mappings, but its threads are there, and so are its peers' regions."""
    return os.getpid() != owner


def check_size(nbytes: int) -> None:
    if nbytes <= 0:
        raise ValueError(f"a region has at least one byte, not {nbytes}")
    if nbytes > MOST_REGION_BYTES:
        raise TransportError(f"no host has {nbytes} bytes of memory; configure smaller pools")


def callers_memory(memory: memoryview | DeviceMemory) -> memoryview:
    """The caller's host memory as writable bytes; ``ValueError`` where it is not."""
    if isinstance(memory, DeviceMemory):
        raise ValueError("this transport takes host memory only")
    view = memoryview(memory)
    if view.readonly or not view.c_contiguous or view.nbytes == 0:
        raise ValueError("memory to register must be writable, contiguous and not empty")
    return view.cast("B")


def deadline_after(timeout: float) -> float:
    """On ``time.monotonic``."""
    if 0.0 <= timeout <= LONGEST_WAIT:
        return time.monotonic() + timeout
    return time.monotonic() + (LONGEST_WAIT if timeout > 0.0 else 0.0)


def seconds_left(deadline: float) -> float:
    left = deadline - time.monotonic()
    return left if left > 0.0 else 0.0
