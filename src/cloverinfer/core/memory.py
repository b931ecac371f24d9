"""Memory of this process, in huge pages where the system has them: for pools and weights, of which
a step reads so much that walks through tables of 4 KiB pages would hold it up.

Owns how memory is asked for; knows nothing of what lies in it, nor who shares it.
"""

from __future__ import annotations

import logging
import mmap

log = logging.getLogger(__name__)

HUGE_FROM_BYTES = 16 << 20
"""Less would waste much of a huge page of 2 MiB."""


def private_memory(nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned memory; ``OSError`` where the host does not give that much.

    Private on purpose: what a mapping shares with other processes, Python's default, is not in huge
    pages unless the system is set up for it.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_FROM_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without them
            log.debug("no huge pages for %d bytes: %s", nbytes, error)
    return memory
