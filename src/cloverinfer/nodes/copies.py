"""What a node needs of its device beside tensors: moments that it comes to, page-locked host
memory, and copies between the two. On the CPU all of it is done as it is asked for.

Which memory is copied, and what for, is not known here.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..core.errors import CloverError
from ..transport.base import DeviceMemory, Region

log = logging.getLogger(__name__)
COPY_SECONDS = 60.0
"""How long a copy may take, what it comes after included."""
_NAP = 20e-6
_WORD = 8


class Moment(ABC):
    """A point in the order of what a device does."""

    handle: int | None = None
    """For ``Endpoint.put(after=...)``: None where there is nothing to wait for."""

    @property
    @abstractmethod
    def happened(self) -> bool:
        """Never false again once it was true."""

    def wait(
        self, seconds: float = COPY_SECONDS, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """``CloverError`` where it has not happened by then: the device is at fault, no peer.
        ``meanwhile`` is called again and again, instead of a nap."""
        deadline = time.monotonic() + seconds
        while not self.happened:
            if time.monotonic() > deadline:
                raise CloverError(f"the device did not come to an end within {seconds:g} s")
            if meanwhile is None:
                time.sleep(_NAP)
            else:
                meanwhile()


class _Now(Moment):
    @property
    def happened(self) -> bool:
        return True


NOW = _Now()


class Copies:
    """Of one node: the host itself. ``close`` once nothing is under way."""

    apart = False
    """Its memory is not the host's: host transports reach it through copies alone."""

    def __init__(self, torch_device: torch.device) -> None:
        self.torch = torch_device

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, memoryview | DeviceMemory]:
        """Memory for a pool, as bytes, and what an attention backend is given of it."""
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        return tensor, memoryview(tensor.numpy())

    def lock(self, region: Region) -> Region:
        """The same, its memory page-locked until ``close``, so that copies need not wait."""
        return region

    def mark(self) -> Moment:
        """All that this thread has asked for so far is done."""
        return NOW

    def follow(self, moment: Moment) -> None:
        """What this thread asks for from now on comes after ``moment``."""

    def beside(self, after: Moment) -> contextlib.AbstractContextManager[None]:
        """What is asked for within comes after ``after``, and beside computing."""
        return contextlib.nullcontext()

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Moment:
        """In the order of computing; both must stay until the moment it returns."""
        target.copy_(source, non_blocking=True)
        return self.mark()

    def fetch(
        self,
        targets: Sequence[torch.Tensor],
        rows: torch.Tensor,
        index: npt.NDArray[np.int32],
        after: Moment,
    ) -> Moment:
        """Copies ``rows[index]`` (bytes ``[n, size]`` of this device) to host memory ``targets``,
        ``[part of n, size]`` each, beside computing. Both must stay until the moment it returns.
        """
        with torch.inference_mode(), self.beside(after):
            picked = _wide(rows).index_select(0, self._move(index)).view(torch.uint8)
            at = 0
            for target in targets:
                _copy(target, picked[at : at + len(target)])
                at += len(target)
            return self.mark()

    def store(
        self, rows: torch.Tensor, index: npt.NDArray[np.int32], sources: Sequence[torch.Tensor]
    ) -> Moment:
        """The reverse: host memory ``sources`` to ``rows[index]``."""
        with torch.inference_mode(), self.beside(NOW):
            shape = (len(index), rows.shape[1])
            arrived = torch.empty(shape, dtype=torch.uint8, device=rows.device)
            at = 0
            for source in sources:
                _copy(arrived[at : at + len(source)], source)
                at += len(source)
            _wide(rows).index_copy_(0, self._move(index), arrived.view(_word(rows)))
            return self.mark()

    def scatter(
        self,
        views: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        at: tuple[torch.Tensor, torch.Tensor],
    ) -> Moment:
        """Host ``values`` ``[t, n, d]`` to ``views`` ``[b, n, size, d]`` of this device, each
        token's to its block and offset; host memory may be used again on return."""
        with torch.inference_mode(), self.beside(NOW):
            blocks_t, offsets_t = (x.to(self.torch) for x in at)
            for view, value in zip(views, values, strict=True):
                view[blocks_t, :, offsets_t] = value.to(self.torch)
            return self.mark()

    def _move(self, index: npt.NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(index.astype(np.int64)).to(self.torch, non_blocking=True)

    def close(self) -> None:
        """Gives page-locked memory back, before that itself goes."""


class _CudaMoment(Moment):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event
        self.handle = event.cuda_event

    @property
    def happened(self) -> bool:
        return bool(self.event.query())


class CudaCopies(Copies):
    """Of a node on a GPU; what goes beside computing has a stream of its own."""

    apart = True

    def __init__(self, torch_device: torch.device) -> None:
        super().__init__(torch_device)
        self._stream = torch.cuda.Stream(torch_device)
        self._locked: list[int] = []

    def allocate(self, nbytes: int) -> tuple[torch.Tensor, memoryview | DeviceMemory]:
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self.torch)
        return tensor, DeviceMemory(tensor.data_ptr(), nbytes, self.torch.index)

    def lock(self, region: Region) -> Region:
        memory = torch.frombuffer(region.buffer, dtype=torch.uint8)
        with torch.cuda.device(self.torch):
            status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
        if int(status) == 0:
            self._locked.append(memory.data_ptr())
        else:
            log.warning(
                "%d bytes of host memory could not be page-locked (CUDA error %d): copies to and "
                "from %s wait for the host",
                memory.numel(),
                int(status),
                self.torch,
            )
        return region

    def mark(self) -> Moment:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch))
        return _CudaMoment(event)

    def follow(self, moment: Moment) -> None:
        if isinstance(moment, _CudaMoment):
            torch.cuda.current_stream(self.torch).wait_event(moment.event)

    @contextlib.contextmanager
    def beside(self, after: Moment) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self.follow(after)
            yield

    def close(self) -> None:
        locked, self._locked = self._locked, []
        if locked:
            torch.cuda.synchronize(self.torch)
        for pointer in locked:
            torch.cuda.cudart().cudaHostUnregister(pointer)


def copies_of(name: str) -> Copies:
    """``name``: of a torch device, as ``NodeConfig.device``."""
    torch_device = torch.device(name)
    return CudaCopies(torch_device) if torch_device.type == "cuda" else Copies(torch_device)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Rows by themselves where they do not adjoin, since such a copy would wait for the host."""
    if target.is_contiguous() and source.is_contiguous():
        target.copy_(source, non_blocking=True)
        return
    for one, other in zip(target, source, strict=True):
        one.copy_(other, non_blocking=True)


def _word(rows: torch.Tensor) -> torch.dtype:
    """The largest type that rows consist of: kernels move an element at a time."""
    whole = rows.shape[1] % _WORD == rows.storage_offset() % _WORD == rows.stride(0) % _WORD == 0
    return torch.int64 if whole else torch.uint8


def _wide(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(_word(rows))
