"""The CUDA attention kernels under compute-sanitizer's memcheck: no bad access.

Tests of test_attention_cuda.py run again in a process of their own, those that
between them reach every duty of the kernel: one and several query tokens, few and many parts of a
row, every feature. Only our kernels are instrumented.
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
CHOSEN = (
    "test_a_few_and_many_query_tokens or test_long_and_ragged_rows or test_features"
    " or test_every_part_of_a_long_row or (test_groups and 3) or (test_many_rows and 300)"
)

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH"),
]


def test_kernels_have_no_bad_access() -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", "memcheck", "--error-exitcode", "9"]
    command += ["--kernel-regex", "kns=clover"]
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHOSEN]
    done = subprocess.run(
        [*command, *tests, str(MODULE)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert "SUMMARY: 0 " in done.stdout, done.stdout[-6000:]
