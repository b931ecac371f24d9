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
    result = subprocess.run(
        [python, str(Path(__file__).parent / SCRIPTS[name])],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        check=False,
    )
    if result.returncode != 0:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    rates: dict[str, float] = json.loads(result.stdout.strip().splitlines()[-1])
    return rates
