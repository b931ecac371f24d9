"""A fake vLLM engine in a process of its own, asked over a pipe:
``python -m tests.vllm_child PIPE``."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.vllm_kit import FakeEngine, free_port

ROOT = Path(__file__).parents[1]
ANSWER_SECONDS = 60.0
LIFE_SECONDS = 300.0


def serve(pipe: Connection) -> None:
    """What it is told first: the role, the GPU that its cache is on or None, options."""
    engine = None
    try:
        role, device, options = pipe.recv()
        if device is not None:
            from tests.vllm_gpu_kit import TorchGpu

            options["memory"] = TorchGpu(device)
        engine = FakeEngine(role, **options)
        pipe.send(engine.address)
        while pipe.poll(LIFE_SECONDS):
            name, args = pipe.recv()
            if name == "close":
                break
            named = getattr(engine, name)
            pipe.send(named(*args) if callable(named) else named)
    except Exception as problem:  # the boundary of a process: told to whoever asked
        pipe.send(problem)
    finally:
        if engine is not None:
            engine.close()


class RemoteEngine:
    """``ask("holds", "d", 0, 32)``: what the engine's method, or attribute, says."""

    def __init__(self, role: str, device: int | None = None, **options: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        options["kv_port"] = free_port(options.get("ranks", 1))
        number = theirs.fileno()
        command = [sys.executable, "-m", "tests.vllm_child", str(number)]
        self._process = subprocess.Popen(command, pass_fds=[number], cwd=ROOT)
        theirs.close()
        try:
            self._pipe.send((role, device, options))
            self.address = self._answer()
        except BaseException:
            self.close()
            raise

    def ask(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(ANSWER_SECONDS), "the other process does not answer"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextlib.contextmanager
    def stopped(self, seconds: float) -> Iterator[None]:
        """All its threads stand still, for that long at least."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
            time.sleep(seconds)
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(ANSWER_SECONDS)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(("close", ()))
        try:
            self._process.wait(ANSWER_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(ANSWER_SECONDS)
        self._pipe.close()


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
