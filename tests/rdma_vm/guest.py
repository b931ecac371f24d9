"""Runs tests of the rdma transport where there is a device: here, or in the guest of run_in_vm.sh.

Knows how to get there and what came of it; which tests those are is the callers'.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/rdma_vm/run_in_vm.sh"
CANNOT = 3
"""Exit status of the script where the host cannot have a guest."""
CONTRACT = [f"tests/contract/test_transport{name}.py" for name in ("", "_order", "_ports")]
PROCESSES = "tests/contract/test_transport_processes.py"
ENGINE, TOKENS = "tests/rdma_vm/test_engine.py", "tests/rdma_vm/test_tokens.py"


def prepare() -> str:
    """Why there can be no guest; empty where there can."""
    done = subprocess.run([SCRIPT, "--prepare"], capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, CANNOT):
        raise RuntimeError(f"{SCRIPT} --prepare ended with {done.returncode}: {done.stderr}")
    return done.stderr.strip() if done.returncode else ""


def in_guest(command: Sequence[str], limit: int) -> subprocess.CompletedProcess[str]:
    """The command's output and status, from a guest that runs no longer than ``limit`` seconds."""
    environ = {"RDMA_VM_LIMIT": str(limit)}
    return subprocess.run(
        ["/usr/bin/env", *(f"{key}={value}" for key, value in environ.items()), SCRIPT, *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit + 60,
    )


def pytest_command(*arguments: str) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "--color=no", "-m", "not large and not ray"]
    return [sys.executable, "-m", "pytest", *options, *arguments]
