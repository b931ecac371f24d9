"""A node's device: whose memory it holds, on which stream it computes, what its failures mean.

On the CPU nothing here does anything. What can be said in numbers is said by ``memory``.
"""

from __future__ import annotations

import gc
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ..core.errors import CloverError, ConfigError, NodeStartError
from .memory import out_of_memory

START_TIMEOUT = 1800.0
"""Seconds to wait for other nodes of this process that load onto a GPU."""
_STARTING = threading.RLock()
"""Held while a node loads and measures: memory is counted for the whole process."""


def release_memory(ended: Iterable[object]) -> None:
    """Gives back what closed nodes of this process, whose threads have ended, held. Nodes refer to
    themselves in circles, which may be set aside from collections of garbage, and whoever starts
    next may need all of the memory: so they let go of everything they had."""
    for node in ended:
        vars(node).clear()
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class NodeDevice:
    """``name``: cpu or cuda:N."""

    def __init__(self, name: str) -> None:
        self.torch = torch.device(name)
        self.on_gpu = self.torch.type == "cuda"
        self.stream = torch.cuda.Stream(self.torch) if self.on_gpu else None
        """Of the node's own: nodes of one process do not wait for each other's kernels."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Kernels of this thread go to the node's device and stream."""
        if not self.on_gpu:
            yield
            return
        with torch.cuda.device(self.torch), torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While a node is made: alone in its process, on its stream, and finished at the end."""
        if not self.on_gpu:
            yield
            return
        if not _STARTING.acquire(timeout=START_TIMEOUT):
            raise NodeStartError("another node of this process has been loading for too long")
        try:
            with self.computing():
                yield
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        finally:
            _STARTING.release()

    @contextmanager
    def taking_memory(self, doing: str) -> Iterator[None]:
        """``ConfigError`` with the numbers where ``doing`` finds too little memory."""
        try:
            yield
        except torch.cuda.OutOfMemoryError:
            raise ConfigError(self._too_little(doing)) from None

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch)[1])

    def allocated(self) -> int:
        """Bytes that this process's tensors hold; 0 on the CPU, where nothing depends on it."""
        return torch.cuda.memory_allocated(self.torch) if self.on_gpu else 0

    def peak_of(self, work: Callable[[], object]) -> int:
        """Bytes that ``work`` takes at most beside what there was before."""
        torch.cuda.synchronize(self.torch)
        torch.cuda.reset_peak_memory_stats(self.torch)
        before = self.allocated()
        work()
        torch.cuda.synchronize(self.torch)
        return torch.cuda.max_memory_allocated(self.torch) - before

    def explained(self, problem: Exception) -> Exception:
        """A step's failure as users should read it. Raises where the device itself has failed:
        no later step of this process could work on it."""
        if not self.on_gpu:
            return problem
        if isinstance(problem, torch.cuda.OutOfMemoryError):
            traceback.clear_frames(problem.__traceback__)  # they hold the step's tensors
            torch.cuda.empty_cache()
            problem = CloverError(self._too_little("a step"))
        torch.cuda.synchronize(self.torch)
        return problem

    def _too_little(self, doing: str) -> str:
        free, total = torch.cuda.mem_get_info(self.torch)
        own = torch.cuda.memory_reserved(self.torch)
        return out_of_memory(str(self.torch), doing, free, total, own)
