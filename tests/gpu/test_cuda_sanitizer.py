"""All CUDA kernels under compute-sanitizer: no bad access, race or barrier.

Tests of test_attention_cuda.py run again in a process of their own, those that between them reach
every duty of the kernels: one and several query tokens, few and many parts of a row, prompts, every
feature, moving blocks; of test_cuda_linear.py those of smaller products; of the dense half's small
kernels and the sampler those in bfloat16. Only our kernels are instrumented. racecheck takes the
smallest of them, and not the sampler, whose clusters it does not end on in two minutes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cloverinfer.attention.cuda import missing

SANITIZER = shutil.which("compute-sanitizer")
ATTENTION, PRODUCTS = "test_attention_cuda.py", "test_cuda_linear.py"
DENSE, SAMPLER = "test_dense_cuda.py", "test_device_sampling.py"
ALL = (
    "test_a_few_and_many_query_tokens or test_long_and_ragged_rows or test_features"
    " or test_every_part_of_a_long_row or (test_groups and 3) or (test_many_rows and 300)"
    " or test_chunks or test_the_pool_moves_as_blocks"
)
SMALL = "test_small_shapes"
ALL_PRODUCTS = "(test_products and not 14336) or (test_gated_products and not 28672)"
SMALL_PRODUCTS = "test_small_products"
ALL_DENSE = "(dtype1 and not 257) or (test_rotation_into_the_pool and float8)"
SMALL_DENSE = "dtype1 and (-3- or inside or 576) and not 257"
ALL_DRAWS = "test_draws and dtype1"

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not on the PATH"),
]


@pytest.mark.parametrize(
    ("tool", "module", "chosen"),
    [
        ("memcheck", ATTENTION, ALL),
        ("racecheck", ATTENTION, SMALL),
        ("synccheck", ATTENTION, SMALL),
        ("memcheck", PRODUCTS, ALL_PRODUCTS),
        ("racecheck", PRODUCTS, SMALL_PRODUCTS),
        ("synccheck", PRODUCTS, SMALL_PRODUCTS),
        ("memcheck", DENSE, ALL_DENSE),
        ("racecheck", DENSE, SMALL_DENSE),
        ("memcheck", SAMPLER, ALL_DRAWS),
    ],
)
def test_kernels_are_clean(tool: str, module: str, chosen: str) -> None:
    assert SANITIZER is not None
    command = [SANITIZER, "--tool", tool, "--error-exitcode", "9"]
    command += ["--kernel-regex", "kns=clover"]
    # A worker's own variables would have the inner run think that it is one.
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen]
    alone = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_XDIST")}
    tests.append(str(Path(__file__).with_name(module)))
    done = subprocess.run(
        [*command, *tests], capture_output=True, text=True, timeout=280, env=alone
    )
    assert done.returncode == 0, done.stdout[-6000:]
    summary = "0 hazards displayed" if tool == "racecheck" else "SUMMARY: 0 "
    assert summary in done.stdout, done.stdout[-6000:]
