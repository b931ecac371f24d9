"""A device that is the host: a graph is a function, events happen when a test says so.

Memory that a device would use for something else by then is spoilt, so that a test sees who reads
what no longer is: pinned buffers once their copies are made, and what a graph gave once another
runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from cloverinfer.attention.torch import TorchAttention
from cloverinfer.nodes.device import Device, Event, Outputs


class HostEvent(Event):
    def __init__(self, polls: int) -> None:
        self._polls = polls

    def ready(self) -> bool:
        self._polls -= 1
        return self._polls < 0


class HostDevice(Device):
    """``late``: how often an event is asked before it has happened. ``fails``: whether there is no
    memory now."""

    def __init__(self, late: int = 0, fails: Callable[[], bool] = lambda: False) -> None:
        self.late, self.fails = late, fails
        self.captured = 0
        self.replayed = 0
        self._last: Outputs = ()

    def use(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def pinned(self, nbytes: int) -> torch.Tensor:
        if self.fails():
            raise MemoryError("a test's memory")
        return torch.full((nbytes,), 0xA5, dtype=torch.uint8)

    def zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype)

    def capture(self, work: Callable[[], Outputs]) -> Callable[[], Outputs]:
        self.captured += 1

        def replay() -> Outputs:
            self.replayed += 1
            for x in self._last:
                x.fill_(-7)
            self._last = work()
            return self._last

        return replay

    def event(self) -> Event:
        return HostEvent(self.late)


class PaddedAttention(TorchAttention):
    """The reference with what a backend of graphs must bear: rows of length 0, slots of -1."""

    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        real = slots_t != -1
        super().append(layer, k_tnd[real], v_tne[real], slots_t[real])

    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        real = lengths_r > 0
        counts = query_starts.diff()
        keep_t = real.repeat_interleave(counts)
        starts = torch.zeros(int(real.sum()) + 1, dtype=torch.int32)
        starts[1:] = counts[real].cumsum(0)
        some = super().attend(layer, q_thd[keep_t], starts, block_tables_rb[real], lengths_r[real])
        o_the = q_thd.new_full((*q_thd.shape[:2], some[0].shape[2]), torch.nan)
        lse_th = torch.full(q_thd.shape[:2], torch.nan)
        o_the[keep_t], lse_th[keep_t] = some
        return o_the, lse_th
