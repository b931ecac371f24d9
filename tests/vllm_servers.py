"""Real vLLM servers with the connector, and the least that pairs them: what an orchestrator does,
without one."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, Protocol

import httpx

from tests import processes

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / "build" / "vllm" / "bin" / "python"
START_SECONDS, ANSWER_SECONDS = 400.0, 300.0
MODEL = "model"
BLOCK = 128
"""vLLM's block size on CPUs."""
TOKENS = 12
AT_ONCE = 16
LONG = 8 * BLOCK
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
FILES = ("config.json", "generation_config.json", "model.safetensors")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


def model_folder(made: Path, into: Path) -> Path:
    """``made``: the folder of a resolved model. vLLM reads every weight file of a folder, so it
    gets one with those of float32 alone."""
    into.mkdir(exist_ok=True)
    for name in (*FILES, *TOKENIZER):
        if not (into / name).exists():
            (into / name).symlink_to(made / name)
    return into


@dataclass
class Server:
    """One vLLM server; ``role``: its kv_role, or empty for one without the connector."""

    folder: Path
    log: Path
    port: int
    role: str = ""
    kv_port: int = 0
    options: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "recompute"
    connector: dict[str, Any] | None = None
    """Another connector's whole configuration, for comparison."""
    environment: dict[str, str] = field(default_factory=dict)
    dtype: str = "float32"
    python: Path = PYTHON
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def kv_address(self) -> str:
        return f"127.0.0.1:{self.kv_port}"

    def command(self) -> list[str]:
        transfer = self.connector or {
            "kv_connector": "RDMAConnector",
            "kv_connector_module_path": "cloverinfer.integrations.vllm",
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"kv_port": self.kv_port} | self.settings,
        }
        return [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(self.folder), "--served-model-name", MODEL, "--dtype", self.dtype,
            "--enforce-eager", "--host", "127.0.0.1", "--port", str(self.port),
            "--max-model-len", "2048", *self.options,
            *(["--kv-transfer-config", json.dumps(transfer)] if self.role else []),
        ]  # fmt: skip

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | self.environment,
                start_new_session=True,
                cwd=self.folder,
            )

    def wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            tail = self.log.read_text(errors="replace")[-3000:]
            assert self.process.poll() is None, f"the server has ended:\n{tail}"
            assert time.monotonic() < deadline, f"the server does not come up:\n{tail}"
            time.sleep(0.5)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """The server and the engine that it started."""
        if self.process is not None:
            _end(self.process.pid, number)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                _end(self.process.pid, signal.SIGKILL)
                self.process.wait(30)
            self.process = None

    def metric(self, name: str) -> float:
        """Sum over a metric's rows."""
        return total(httpx.get(f"{self.url}/metrics", timeout=30).text, name, {})

    def usage(self) -> float:
        """Share of the KV blocks that are taken, as of the last step."""
        return self.metric("vllm:kv_cache_usage_perc")

    def ask(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_SECONDS)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Its engine and worker do; the process that listens does not."""
        assert self.process is not None
        pids = _engine_of(self.process.pid)
        try:
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            yield
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def total(metrics: str, name: str, labels: dict[str, str]) -> float:
    """Sum over the rows of a metric that have these labels."""
    rows = [row for row in metrics.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", row)]
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows if all(one in row for one in wanted))


def _members(session: int) -> Iterator[Path]:
    """The folders in /proc of a session's processes."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):
            if os.getsid(int(folder.name)) == session:
                yield folder


def _engine_of(session: int) -> list[int]:
    """The processes of vLLM's engine and its workers among those of a session."""
    names = ("VLLM::Engine", "VLLM::Worker")
    members = _members(session)
    found = [int(each.name) for each in members if (each / "comm").read_text().startswith(names)]
    assert len(found) >= 2, "the server has no engine and worker"
    return found


def _end(session: int, number: int) -> None:
    """Its processes, but for Python's trackers, which then take away what the others shared."""
    for member in list(_members(session)):
        with contextlib.suppress(OSError):
            if b"resource_tracker" not in (member / "cmdline").read_bytes():
                os.kill(int(member.name), number)


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield
    finally:
        for server in servers:
            server.kill(signal.SIGTERM)


def fresh(seed: str) -> list[int]:
    """A long prompt that nobody has cached."""
    words = random.Random(seed)
    return [words.randrange(1000, 30000) for _ in range(LONG)]


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + ANSWER_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{what}: it did not happen"
        time.sleep(0.05)


def until_idle(*servers: Server) -> None:
    """All blocks are free. vLLM counts, and gives back some of them, with its next step only."""
    for server in servers:
        until(
            lambda server=server: server.ask(body_of([1], 1)) and not server.usage(),
            f"blocks of {server.log.stem} are free again",
        )


def body_of(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "return_token_ids": True,
    }  # fmt: skip


@dataclass
class HandOver:
    """One request at both servers, cancelled by closing its streams."""

    prefill: Server
    decode: Server
    prompt: list[int]
    tokens: int = 16
    transfer: str = field(default_factory=lambda: uuid.uuid4().hex)
    more: dict[str, Any] = field(default_factory=dict)
    """What else the client asks for."""

    def decode_body(self) -> dict[str, Any]:
        params = {"do_remote_prefill": True, "transfer_id": self.transfer}
        return body_of(self.prompt, self.tokens) | self.more | {"kv_transfer_params": params}

    def prefill_body(self, attempt: int = 0) -> dict[str, Any]:
        params = {
            "do_remote_decode": True,
            "transfer_id": self.transfer,
            "attempt": attempt,
            "decode_address": self.decode.kv_address,
        }
        return body_of(self.prompt, 1) | {"kv_transfer_params": params}

    def answer(self) -> dict[str, Any]:
        """Of decode, with prefill asked at the same time."""
        with ThreadPoolExecutor(2) as pool:
            decode = pool.submit(self.decode.ask, self.decode_body())
            prefill = pool.submit(self.prefill.ask, self.prefill_body())
            assert prefill.result().status_code == 200, prefill.result().text
            assert decode.result().status_code == 200, decode.result().text
            return dict(decode.result().json())


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["choices"][0]["token_ids"])


class Listens(Protocol):
    """At a port of this host."""

    port: int


class Begun:
    """A request that is under way and may be cancelled, as by a client that is gone."""

    def __init__(self, server: Listens, body: dict[str, Any]) -> None:
        self.status: int | None = None
        self.text = ""
        self.answers = threading.Event()
        """The first of the answer is there: with a stream, the first token."""
        self._connection = HTTPConnection("127.0.0.1", server.port, timeout=ANSWER_SECONDS)
        self._connection.connect()
        self._socket = self._connection.sock
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()

    def _run(self, body: dict[str, Any]) -> None:
        headers = {"Content-Type": "application/json"}
        with contextlib.suppress(OSError, HTTPException):
            self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = self._connection.getresponse()
            first = answer.read(1)
            self.answers.set()
            self.text = (first + answer.read()).decode()
            self.status = answer.status
        self._connection.close()

    def cancel(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.wait()

    def wait(self) -> None:
        self._thread.join(ANSWER_SECONDS)
        assert not self._thread.is_alive(), "no answer"


@dataclass
class Entry:
    """The orchestrator in front of instances."""

    port: int

    def metric(self, name: str, **labels: str) -> float:
        text = httpx.get(f"http://127.0.0.1:{self.port}/metrics", timeout=30).text
        return total(text, f"cloverinfer_orchestrator_{name}", labels)

    def is_ready(self) -> bool:
        url = f"http://127.0.0.1:{self.port}/ready"
        return httpx.get(url, timeout=30).status_code == 200

    def ask(self, prompt: list[int]) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        return httpx.post(url, json=body_of(prompt, TOKENS), timeout=ANSWER_SECONDS)

    def prefilled(self) -> float:
        return self.metric("attempts_total", role="prefill", result="ok")


@contextlib.contextmanager
def orchestrated(*servers: Server, policy: str = "least_loaded") -> Iterator[Entry]:
    """The command in front of servers that prefill or decode, by their ``role``."""
    command = [sys.executable, "-m", "cloverinfer.cli", "orchestrate", "--port", "0", "--quiet"]
    command += ["--policy", policy]
    for one in servers:
        decodes = one.role == "kv_consumer"
        named = f"decode={one.url}#{one.kv_address}" if decodes else f"prefill={one.url}"
        command += ["--instance", named]
    with processes.start(command, stdout=subprocess.PIPE) as process:
        try:
            base = process.stdout.readline().removeprefix("ready: ").strip()
            yield Entry(int(base.rpartition(":")[2]))
        finally:
            process.kill()
