"""How fast a paged call's memory can be read at all: a bare loop over its runs, in its order.

Owns the loop's build, with the system's C++ compiler, and the list of runs; knows no attention.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("_paged_read.cpp")
AHEAD = (8 << 10, 16 << 10)
"""Bytes that lines are asked for before they are read; the better one counts."""


class PagedReader:
    """Reads runs with ``threads`` threads; ``build`` is None where there is no compiler."""

    def __init__(self, library: ctypes.CDLL, threads: int) -> None:
        self._read = library.read_runs
        self._read.restype = ctypes.c_double
        self._read.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_int]
        self._threads = threads

    @classmethod
    def build(cls, threads: int) -> PagedReader | None:
        compiler = shutil.which("c++")
        if compiler is None:
            return None
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "paged_read.so"
            flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]
            subprocess.run([compiler, *flags, str(SOURCE), "-o", str(path)], check=True, timeout=60)
            return cls(ctypes.CDLL(str(path)), threads)

    def bandwidth(self, runs: torch.Tensor, nbytes: int) -> float:
        """Bytes per second; ``runs`` is int64 addresses of ``nbytes`` each, keys and values in
        turn."""
        count = runs.numel()
        seconds = [
            self._read(runs.data_ptr(), count, nbytes, ahead, self._threads) for ahead in AHEAD
        ]
        return count * nbytes / min(seconds)


def runs_of(
    base: int, block_bytes: int, heads: int, nbytes: int, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Addresses that one call reads, of each row of ``table`` [rows, blocks, an even number], in
    two orders: each head's blocks, and each two blocks' heads. Keys and values take turns. A block
    is all heads' keys and then their values, ``nbytes`` a head."""
    at_block = base + table.to(torch.int64)[:, None, :, None] * block_bytes
    at_head = torch.arange(heads)[None, :, None, None] * nbytes
    side = torch.arange(2)[None, None, None, :] * heads * nbytes
    by_head = at_block + at_head + side
    by_blocks = by_head.unflatten(2, (-1, 2)).transpose(1, 2)
    return by_head.flatten().contiguous(), by_blocks.flatten().contiguous()
