"""Other engines, each in an environment of its own, on the same weights, prompts and threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from cloverinfer.models import ResolvedModel, load_tokenizer

SCRIPTS = {
    "transformers": "_peer_transformers.py",
    "vllm": "_peer_vllm.py",
    "llama.cpp": "_peer_llama_cpp.py",
}
KERNELS = {"llama.cpp": "_peer_ggml.py", "vllm": "_peer_vllm_attention.py"}
"""Attention kernels of other engines."""


def prompts(model: ResolvedModel, count: int, length: int) -> list[list[int]]:
    """Different prompts of equal length, so that no prefix cache helps anyone."""
    text = "The quick brown fox jumps over the lazy dog while seven wizards count the stars. "
    tokens = load_tokenizer(model).encode(text * (2 + (length + count) // 8))
    return [tokens[i : i + length] for i in range(count)]


def all_peers(wanted: list[str]) -> list[str]:
    """transformers, which this environment has, and what was asked for."""
    return [f"transformers={sys.executable}", *wanted]


def run_peer(
    peer: str, model: ResolvedModel, inputs: list[list[int]], tokens: int, threads: int
) -> dict[str, float]:
    """``peer`` is ``name=python``; its script prints one JSON object of rates in tokens/s."""
    name, _, python = peer.partition("=")
    if name not in SCRIPTS or not python:
        raise SystemExit(f"--peer {peer}: want NAME=PYTHON with NAME one of {', '.join(SCRIPTS)}")
    job = {
        "model": str(model.path),
        "dtype": model.dtype,
        "prompts": inputs,
        "tokens": tokens,
        "threads": threads,
    }
    return _run(python, SCRIPTS[name], job, threads)


def run_kernel_peer(peer: str, job: dict[str, object], threads: int) -> dict[str, float]:
    """Seconds of a peer's attention kernel on one shape."""
    name, _, python = peer.partition("=")
    if name not in KERNELS or not python:
        raise SystemExit(f"--peer {peer}: want NAME=PYTHON with NAME one of {', '.join(KERNELS)}")
    return _run(python, KERNELS[name], job, threads)


def _run(python: str, script: str, job: dict[str, object], threads: int) -> dict[str, float]:
    result = subprocess.run(
        [python, str(Path(__file__).parent / script)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{script} failed:\n{result.stderr[-2000:]}")
    # Engines log to the same stream, some of them while they end.
    printed = [line for line in result.stdout.splitlines() if line.startswith("{")]
    if not printed:
        raise SystemExit(f"{script} printed no figures:\n{result.stdout[-2000:]}")
    figures: dict[str, float] = json.loads(printed[-1])
    return figures
