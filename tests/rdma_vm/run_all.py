"""``make test-rdma``: every test of the rdma transport, on this host's devices or in a guest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.rdma_vm import guest  # noqa: E402

from cloverinfer.transport import missing  # noqa: E402

LIMIT = 900
"""Seconds that the guest may take for each part."""
SPINNING = "RDMA_SPIN_US=20000"
PARTS = [
    [guest.ENGINE],
    ["-k", "rdma", *guest.CONTRACT],
    [SPINNING, "-k", "rdma", *guest.CONTRACT],
    ["-k", "rdma", guest.PROCESSES],
    [guest.TOKENS],
]
"""What pytest is given, after a variable where it wants one."""


def main() -> int:
    here = not missing("rdma")
    print(f"==> rdma tests {'on a device of this host' if here else 'in a guest'}", flush=True)
    failed = 0
    for part in PARTS:
        variables = [one for one in part if one == SPINNING]
        command = ["/usr/bin/env", *variables, *guest.pytest_command(*part[len(variables) :])]
        if here:
            failed += subprocess.run(command, cwd=ROOT, timeout=LIMIT).returncode != 0
            continue
        done = guest.in_guest(command, LIMIT)
        print(done.stdout, flush=True)
        failed += done.returncode != 0
    print(f"==> rdma tests: {failed} of {len(PARTS)} parts failed" if failed else "==> all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
