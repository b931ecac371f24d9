"""Keeps Python's collections of garbage short while something serves.

A full collection walks every object that could be in a cycle, which takes a fifth of a second once
PyTorch is loaded, and no thread of the process runs meanwhile. So what there is when an engine or a
node has started is set aside until it ends. Garbage that is set aside waits until then too.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()
_users = 0


def set_aside() -> None:
    """What exists now is not walked again before ``take_back``, which is called once for each."""
    global _users
    with _lock:
        _users += 1
        gc.freeze()


def take_back() -> None:
    """With the last one, everything may be collected again."""
    global _users
    with _lock:
        assert _users > 0, "nothing is set aside"
        _users -= 1
        if not _users:
            gc.unfreeze()
