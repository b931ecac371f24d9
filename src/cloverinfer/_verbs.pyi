"""The native engine of the rdma transport (csrc/bindings/verbs.cpp); only where libibverbs is."""

import numpy as np
import numpy.typing as npt

from ._native import Memory

def devices() -> list[str]:
    """A line for every port of every RDMA device: "rx0 port 1: active, Ethernet"."""

class Settings:
    """``NetworkConfig``'s rdma_* fields; empty, 0 and -1 stand for none."""

    device: str
    port: int
    gid_index: int
    gid_type: str
    gid_address: str
    mtu: int
    queue_pairs: int
    queue_depth: int
    signal_every: int
    block_size: int
    retries: int
    timeout: int
    service_level: int
    spin_us: int
    on_demand: bool

class VerbsRanges:
    """Both sides of a put. Keeps the offsets alive, not the memory."""

    def __init__(
        self,
        source: tuple[int, int],
        source_region: int,
        local: npt.NDArray[np.int64],
        region: tuple[int, int],
        remote: npt.NDArray[np.int64],
        length: int,
    ) -> None:
        """``source``: address and bytes of the local region, whose number follows; ``region``:
        number and bytes of the peer's.
        """

class VerbsEngine:
    """An endpoint's device and links. ``TransportError`` where there is no such device."""

    def __init__(self, settings: Settings) -> None: ...
    @property
    def malformed(self) -> int:
        """Links that were dropped for what they said."""
    @property
    def device(self) -> str: ...
    @property
    def gid_index(self) -> int: ...
    @property
    def mtu(self) -> int:
        """Bytes of data in a packet."""
    def add_region(self, number: int, memory: Memory) -> None:
        """Lets peers write there; pinned until it is removed. ``TransportError`` says why the
        device cannot register it, and what to do about that.
        """
    def add_device_region(self, number: int, pointer: int, nbytes: int) -> None:
        """The same for memory of a GPU, where nvidia-peermem is loaded."""
    def add_dma_buf(self, number: int, fd: int, offset: int, pointer: int, nbytes: int) -> None:
        """The same for memory of a GPU that a dma-buf was exported of."""
    def remove_region(self, number: int) -> None:
        """Returns once nothing writes there any more."""
    def add_outgoing(self, socket: int, timeout: float) -> int:
        """A link over a connected socket, which it takes over."""
    def drop_outgoing(self, link: int) -> None:
        """Fails what is pending on it, and destroys its queue pairs."""
    def add_incoming(self, socket: int) -> int:
        """0: this endpoint is closed, and so is the socket."""
    def fence_incoming(self, link: int) -> None:
        """Destroys its queue pairs: nothing that the peer has posted is written any more."""
    def problem(self, link: int) -> str:
        """Why an outgoing link is of no use; empty while it is."""
    def query(self, link: int, region: int, nbytes: int, timeout: float) -> None:
        """``TransportError`` unless the peer has this region of this size."""
    def put(
        self,
        link: int,
        number: int,
        ranges: VerbsRanges,
        index: npt.NDArray[np.int32],
        notice: int,
        timeout: float,
    ) -> None:
        """Begins a put; ``poll`` tells its end by ``number``. ``ValueError``, before anything has
        moved, if a row names no slice. Waits for room.
        """
    def send(self, link: int, message: bytes, timeout: float) -> None:
        """Begins to send; waits for room."""
    def poll(
        self, timeout: float
    ) -> tuple[list[tuple[int, int | bytes | None]], list[tuple[int, bool, str]]]:
        """([(link, notice, message, or None for the link's end)], [(number of a put, whether it
        missed its deadline, what went wrong or "")]). Waits, asleep, up to ``timeout`` seconds for
        the first; returns early with nothing at a signal.
        """
    def take_events(self) -> list[str]:
        """What the device has said of itself since the last call."""
    def close(self, timeout: float) -> None:
        """Waits up to ``timeout`` seconds for what is pending, then ends everything."""
