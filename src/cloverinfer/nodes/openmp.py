"""The OpenMP workers behind PyTorch's operators, seen from the thread that they work for.

Every thread that runs a parallel operator gets a team of workers of its own, which libgomp keeps.
Where there are more of them in a process than cores, it lets no worker wait awake for the next
operator, and each operator of a decode step pays for waking it: a third of a step, as measured.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)
_SOFT = 1
"""omp_pause_soft: keep settings, end threads (OpenMP 5.0, 3.2.44)."""


def release_workers() -> None:
    """Ends the calling thread's idle workers; its next parallel operator makes new ones."""
    pause = _pause()
    if pause is not None and pause() != 0:
        log.debug("OpenMP kept its workers")


@functools.cache
def _pause() -> Callable[[], int] | None:
    """libgomp's ``omp_pause_resource`` for this host; None where PyTorch uses another runtime."""
    for path in _loaded("libgomp"):
        try:
            library = ctypes.CDLL(path)
            host = library.omp_get_initial_device()
            return functools.partial(library.omp_pause_resource, _SOFT, host)
        except (OSError, AttributeError) as problem:
            log.debug("%s has no omp_pause_resource: %s", path, problem)
    return None


def _loaded(name: str) -> set[str]:
    """Files of this process's libraries of that name."""
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if name in line}
