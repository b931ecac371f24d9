"""Where a fake vLLM worker's cache is on a GPU: a fake one, or a real one by PyTorch.

Both compute later than they are asked to, in order, and spoil a place before they write it: what
is put before a layer is complete arrives spoilt.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from cloverinfer.nodes.copies import Copies, Moment, copies_of
from tests.cuda_kit import FakeDriver, FakeStream
from tests.vllm_kit import ALL_HEADS, DIM, LAYERS, FakeTensor, HostMemory, value

SPOILT = -9.0
Places = list[tuple[int, int, int]]


class FakeMoment(Moment):
    def __init__(self, driver: FakeDriver, event: int) -> None:
        self.handle = event
        self._driver = driver

    @property
    def happened(self) -> bool:
        return self._driver._events[self.handle].is_set()


class WaitingCopies(Copies):
    """The fake device's memory is the host's: what comes after a moment waits for it here."""

    @contextlib.contextmanager
    def beside(self, after: Moment) -> Iterator[None]:
        after.wait(60)
        yield


class FakeGpu(HostMemory):
    """Of a driver that engines share, as those of one host do. ``slow``: seconds that each layer
    takes."""

    def __init__(self, driver: FakeDriver, device: int = 0, slow: float = 0.02) -> None:
        self.driver = driver
        self.device = device
        self.slow = slow
        self.stream = FakeStream(driver)

    def copies(self, name: str) -> Copies:
        assert name == f"cuda:{self.device}"
        made = WaitingCopies(torch.device("cpu"))
        made.mark = self.mark  # type: ignore[method-assign]
        return made

    def mark(self) -> Moment:
        event, happen = self.driver.event()
        self.stream.add(happen)
        return FakeMoment(self.driver, event)

    def make(self, shape: tuple[int, ...]) -> np.ndarray:
        nbytes = 4 * int(np.prod(shape))
        at = self.driver.allocate(nbytes, self.device).pointer
        storage = np.frombuffer((ctypes.c_char * nbytes).from_address(at), np.float32)
        storage = storage.reshape(shape)
        storage[:] = -1.0
        return storage

    def tensor(self, layer: Any, storage: Any) -> Any:
        return FakeTensor(layer, storage, self.device)

    def write(self, view: Any, layer: int, places: Places, heads: range) -> None:
        def compute() -> None:
            for _, block, offset in places:
                view[block, :, offset] = SPOILT
            time.sleep(self.slow)
            HostMemory.write(self, view, layer, places, heads)

        self.later(compute)

    def later(self, work: Callable[[], None]) -> None:
        self.stream.add(work)


class TorchGpu(HostMemory):
    """A real one. It computes on ``stream``, standing still for ``cycles`` in each layer."""

    def __init__(self, device: int = 0, cycles: int = 20_000_000, longest: int = 256) -> None:
        self.device = torch.device("cuda", device)
        self.cycles = cycles
        self.stream = torch.cuda.Stream(self.device)
        self._reading = torch.cuda.Stream(self.device)
        values = [
            [[value(i, at, head) for head in range(ALL_HEADS)] for at in range(longest)]
            for i in range(LAYERS)
        ]
        self._values = torch.from_numpy(np.array(values)).to(self.device)
        assert self._values.shape == (LAYERS, longest, ALL_HEADS, 2 * DIM)
        torch.cuda.synchronize(self.device)

    def copies(self, name: str) -> Copies:
        made = copies_of(name)
        plain = made.mark

        def mark() -> Moment:  # engines of one thread have streams of their own
            if torch.cuda.current_stream(self.device) != torch.cuda.default_stream(self.device):
                return plain()  # of a copy
            with torch.cuda.stream(self.stream):
                return plain()

        made.mark = mark  # type: ignore[method-assign]
        return made

    def make(self, shape: tuple[int, ...]) -> torch.Tensor:
        storage = torch.full(shape, -1.0, dtype=torch.float32, device=self.device)
        torch.cuda.synchronize(self.device)
        return storage

    def layer(self, storage: torch.Tensor, i: int, axes: tuple[int, ...]) -> torch.Tensor:
        return storage[i].permute(axes)

    def tensor(self, layer: torch.Tensor, storage: torch.Tensor) -> torch.Tensor:
        return layer

    def write(self, view: torch.Tensor, layer: int, places: Places, heads: range) -> None:
        with torch.cuda.stream(self.stream):
            for _, block, offset in places:
                view[block, :, offset] = SPOILT
            torch.cuda._sleep(self.cycles)
            for at, block, offset in places:
                view[block, :, offset] = self._values[layer, at, heads.start : heads.stop]

    def later(self, work: Callable[[], None]) -> None:
        """Asked for now, done once the stream has stood still."""
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(10 * self.cycles)
            work()

    def read(self, view: torch.Tensor) -> np.ndarray:
        with torch.cuda.stream(self._reading):
            return view.cpu().numpy()
