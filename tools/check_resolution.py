"""Checks that the pinned requirements resolve for every supported Python, from wheels alone.

Only metadata is read, nothing is installed. Needs ``uv``; ``make check-resolve`` brings it.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
BUILD_REQUIREMENTS = ("scikit-build-core", "pybind11", "cmake", "ninja")
UNPINNED = re.compile(r"(nvidia-|cuda-|triton|setuptools)")
"""What PyTorch's CUDA builds bring at versions of their own choosing."""


def resolve(python: str, uv: str) -> tuple[list[str], str]:
    """The pins chosen for one Python, or none and the resolver's complaint."""
    command = [
        uv, "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-build",
        "--python-version", python, "--extra", "dev",
        "--constraints", str(ROOT / "constraints.txt"), str(ROOT / "pyproject.toml"), "-",
    ]  # fmt: skip
    done = subprocess.run(
        command, input="\n".join(BUILD_REQUIREMENTS), capture_output=True, text=True, check=False
    )
    return (done.stdout.split(), "") if done.returncode == 0 else ([], done.stderr.strip())


def unpinned(chosen: list[str], constraints: str) -> list[str]:
    """Packages that the constraints do not hold at the version chosen."""
    pins = set(re.findall(r"^[\w.-]+==[\w.+-]+", constraints, re.MULTILINE))
    return [one for one in chosen if one not in pins and not UNPINNED.match(one)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="*", default=PYTHONS, metavar="X.Y")
    parser.add_argument("--uv", default=shutil.which("uv"), help="path of uv (default: on PATH)")
    args = parser.parse_args()
    if args.uv is None:
        parser.error("uv is not on PATH: run `make check-resolve`")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    bad = 0
    for python in args.pythons:
        chosen, error = resolve(python, args.uv)
        loose = unpinned(chosen, constraints)
        bad += bool(error or loose)
        verdict = error or (f"not pinned: {', '.join(loose)}" if loose else "ok")
        print(f"python {python}: {len(chosen)} packages: {verdict}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
