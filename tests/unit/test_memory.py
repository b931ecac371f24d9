"""Memory that is asked for in huge pages must be of a kind that the system gives them for."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

from cloverinfer.core.memory import HUGE_FROM_BYTES, private_memory

_SMAPS = Path("/proc/self/smaps")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def mapping_at(address: int) -> str:
    """What the system says of the mapping that an address lies in."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", _SMAPS.read_text()):
        begin, end = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return mapping
    raise AssertionError(f"nothing is mapped at {address:#x}")


@pytest.mark.skipif(not _SMAPS.exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("nbytes", [mmap.PAGESIZE, HUGE_FROM_BYTES])
def test_memory_is_private_and_large_memory_asks_for_huge_pages(nbytes: int) -> None:
    memory = np.frombuffer(private_memory(nbytes), np.uint8)
    assert memory.nbytes == nbytes
    assert not memory.any()
    mapping = mapping_at(memory.ctypes.data)
    assert mapping.split()[1] == "rw-p"
    flags = re.search(r"^VmFlags:(.*)$", mapping, re.MULTILINE)
    if nbytes >= HUGE_FROM_BYTES and flags and _HUGE_PAGES.exists():
        assert "hg" in flags[1].split()
