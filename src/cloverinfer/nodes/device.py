"""What steps on a GPU need of it: memory, a stream, events, captured graphs.

A thin seam: what is built on it runs in tests on the host, where a graph is a function and events
have happened. It knows nothing of models and steps.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ..attention.borrow import borrow_bytes
from ..core.errors import CloverError

Outputs = tuple[torch.Tensor, ...]
WAIT_SECONDS = 300.0
"""Longest wait for a device; by then the scheduler has long found its node hung."""
_NAP_SECONDS = 20e-6


class Event(ABC):
    """A place in a device's work."""

    @abstractmethod
    def ready(self) -> bool:
        """Everything before it is done; raises what the device failed with."""

    def wait(self, timeout: float = WAIT_SECONDS) -> None:
        """``CloverError`` where it is not ready in time: the device is at fault, no peer."""
        deadline = time.monotonic() + timeout
        while not self.ready():
            if time.monotonic() > deadline:
                raise CloverError(f"the device did not finish a step within {timeout:g} s")
            time.sleep(_NAP_SECONDS)


class Device(ABC):
    """Used by one thread. All work is on its one stream, in order."""

    @abstractmethod
    def use(self) -> AbstractContextManager[object]:
        """Makes its stream the current one."""

    @abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Bytes of the host that copies need not wait for. Memory of one that nobody holds any
        more is used again only once the copies from and to it are done."""

    @abstractmethod
    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """On the device, 1-D."""

    @abstractmethod
    def capture(self, work: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """``work``'s launches as one: it has run before with inputs of the same places. What it
        gives lies where it lay before, until the next run of whatever was captured here."""

    @abstractmethod
    def event(self) -> Event:
        """After all work up to now."""


class CudaEvent(Event):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def ready(self) -> bool:
        return bool(self._event.query())


class CudaDevice(Device):
    """A GPU and a stream of it; without ``stream`` one of its own."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        self.stream = stream or torch.cuda.Stream(device)
        self._graphs = torch.cuda.graph_pool_handle()

    def use(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.device)

    def capture(self, work: Callable[[], Outputs]) -> Callable[[], Outputs]:
        graph = torch.cuda.CUDAGraph()
        with self.use():
            # Only this thread's calls must be such as can be captured: others may allocate.
            graph.capture_begin(pool=self._graphs, capture_error_mode="thread_local")
            try:
                outputs = work()
            finally:
                graph.capture_end()
        # Not held, so that graphs captured later may use the memory: one of them runs at a time.
        borrowed = tuple(borrow(x) for x in outputs)

        def replay() -> Outputs:
            graph.replay()
            return borrowed

        return replay

    def event(self) -> Event:
        return CudaEvent(self.stream)


def borrow(x: torch.Tensor) -> torch.Tensor:
    """The same numbers without holding their memory. ``x`` is contiguous."""
    assert x.is_contiguous()
    if x.numel() == 0:
        return torch.empty_like(x)
    flat = borrow_bytes(x.data_ptr(), x.nbytes, x.device)
    return flat.view(x.dtype).view(x.shape)
