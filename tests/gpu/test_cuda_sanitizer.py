"""The CUDA attention kernels under compute-sanitizer: no bad access, no race, no bad barrier.

Tests of test_attention_cuda.py run again in a process of their own, those that between them reach
every duty of the kernels: one and several query tokens, few and many parts of a row, prompts, every
feature. Only our kernels are instrumented. racecheck takes the smallest of them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloverinfer.attention.cuda import missing

SANITIZER = shutil.which("compute-sanitizer")
MODULE = Path(__file__).with_name("test_attention_cuda.py")
ALL = (
    "test_a_few_and_many_query_tokens or test_long_and_ragged_rows or test_features"
    " or test_every_part_of_a_long_row or (test_groups and 3) or (test_many_rows and 300)"
    " or test_chunks"
)
SMALL = "test_small_shapes"

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH"),
]


@pytest.mark.parametrize(
    ("tool", "chosen"), [("memcheck", ALL), ("racecheck", SMALL), ("synccheck", SMALL)]
)
def test_kernels_are_clean(tool: str, chosen: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    command += ["--kernel-regex", "kns=clover"]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    done = subprocess.run(
        [*command, *tests, str(MODULE)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:]
    summary = "0 hazards displayed" if tool == "racecheck" else "SUMMARY: 0 "
    assert summary in done.stdout, done.stdout[-6000:]
