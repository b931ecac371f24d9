"""Other engines, each in an environment of its own, on the same weights, prompts and threads."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

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


def peer_dtype(name: str, model: ResolvedModel, args: argparse.Namespace) -> str:
    """Of its weights: llama.cpp reads the GGUF file as it is."""
    return "file" if name == "llama.cpp" else args.peer_dtype or model.dtype


def run_peer(
    peer: str, model: ResolvedModel, inputs: list[list[int]], tokens: int, args: argparse.Namespace
) -> dict[str, float]:
    """``peer`` is ``name=python``; its script prints one JSON object of rates in tokens/s. ``args``
    are a ``model_parser``'s."""
    name, _, python = peer.partition("=")
    if name not in SCRIPTS or not python:
        raise SystemExit(f"--peer {peer}: want NAME=PYTHON with NAME one of {', '.join(SCRIPTS)}")
    job = {
        "model": str(model.path),
        "dtype": peer_dtype(name, model, args),
        "prompts": inputs,
        "tokens": tokens,
        "threads": args.threads,
    }
    return _run(python, SCRIPTS[name], job, args.threads)


class PeerProcess:
    """A script of a peer in its own environment: a line for each job and answer."""

    def __init__(self, name: str, python: str, script: str, threads: int | None = None) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by close()
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=os.environ | ({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            bufsize=0,
        )

    def ask(self, job: dict[str, object], timeout: float) -> dict[str, Any]:
        """The answer to it; ``timeout`` in seconds."""
        assert self._process.stdin is not None
        left = memoryview(json.dumps(job).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # its errors are told below
            while left:
                left = left[self._process.stdin.write(left) :]
        until = time.monotonic() + timeout
        while not (line := self._line(until)).startswith(b"{"):
            pass  # what its libraries log
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _line(self, until: float) -> bytes:
        out = self._process.stdout
        assert out is not None
        line = b""
        while not line.endswith(b"\n"):
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise SystemExit(f"{self.name} has not answered in time")
            byte = out.read(1)
            if not byte:
                self._errors.seek(0)
                raise SystemExit(f"{self.name} failed:\n{self._errors.read()[-2000:]}")
            line += byte
        return line

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        self._process.stdout.close()
        self._errors.close()


class KernelPeer(PeerProcess):
    """A peer's attention kernel, in one process for all shapes."""

    def __init__(self, peer: str, threads: int) -> None:
        name, _, python = peer.partition("=")
        if name not in KERNELS or not python:
            known = ", ".join(KERNELS)
            raise SystemExit(f"--peer {peer}: want NAME=PYTHON with NAME one of {known}")
        super().__init__(name, python, KERNELS[name], threads)

    def seconds(self, job: dict[str, object], timeout: float = 120) -> float | None:
        """Of one call; None where the peer does not take such a shape."""
        answer = self.ask(job, timeout)
        if "refused" in answer:
            print(f"{self.name}: {answer['refused']}")
        return answer.get("seconds")


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
