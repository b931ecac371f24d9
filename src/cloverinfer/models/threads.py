"""How many threads a compiled graph computes on: the native kernels on all that torch has, and
PyTorch's operators between them on one where there are few tokens.

PyTorch's threads spin for milliseconds after each operator that they shared, on the cores that the
kernels' own threads want next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

FEW = 64
"""Tokens from which on PyTorch's operators are worth sharing."""
_KERNELS = threading.local()


def kernel_threads() -> int:
    """Of the native kernels that the calling thread calls."""
    return getattr(_KERNELS, "count", 0) or torch.get_num_threads()


@contextlib.contextmanager
def alone(tokens: int) -> Iterator[None]:
    """While a graph of kernels and small operators runs."""
    count = torch.get_num_threads()
    if tokens >= FEW or count == 1:
        yield
        return
    torch.set_num_threads(1)
    _KERNELS.count = count
    try:
        yield
    finally:
        _KERNELS.count = 0
        torch.set_num_threads(count)
