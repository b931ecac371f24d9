"""The application of Ray Serve: what a RayService is told, and a server that runs by it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from tests import processes
from tests.servers import events, wait
from tests.tiny_models import add_tokenizer, make_tiny

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "serve" / "bin" / "python"
VISITOR = [str(PYTHON), str(ROOT / "tests" / "serve_visitor.py")]


@pytest.fixture(scope="module", autouse=True)
def _ray_serve() -> None:
    if not PYTHON.exists():
        pytest.skip("there is no build/serve with Ray Serve: make test-deploy makes it")
    words = [str(PYTHON), "-c", "import ray.serve"]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120)
    if told.returncode != 0:
        pytest.skip(f"Ray Serve cannot be imported: {told.stderr.strip().splitlines()[-1]}")


def of_the_service() -> dict[str, Any]:
    """The Serve configuration of the manifest."""
    service = yaml.safe_load((ROOT / "deploy/k8s/rayservice.yaml").read_text())
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    assert isinstance(config, dict)
    return config


def checked(config: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    words = [*VISITOR, "check", json.dumps(config)]
    return subprocess.run(words, capture_output=True, text=True, timeout=120)


def test_a_ray_service_is_told_what_ray_serve_and_we_take() -> None:
    told = checked(of_the_service())
    assert (told.returncode, told.stdout) == (0, "CloverInfer 1\n"), told.stderr
    for args, reason in (
        ({"cluster": {"topolgy": "pda"}}, "did you mean topology"),
        ({"server": {"port": 80}}, "server.port has no effect here"),
    ):
        config = of_the_service()
        config["applications"][0]["args"] = args
        told = checked(config)
        assert told.returncode != 0
        assert reason in told.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The manifest's application with a small model: its address, and the process to end it by."""
    config = of_the_service()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    application = config["applications"][0]
    application["deployments"][0]["health_check_period_s"] = 1
    application["args"] |= {
        "model": {"model_path": str(add_tokenizer(make_tiny("llama", tmp_path)))},
        "chat": {"chat_template": "{{ messages[0]['content'] }}"},
    }
    application["args"]["cluster"] |= {"threads": 1, "room_timeout": 60}
    # Not under pytest's own: the paths of Ray's sockets may have 107 characters.
    with tempfile.TemporaryDirectory(
        prefix="serve-", dir="/tmp", ignore_cleanup_errors=True
    ) as ray:
        words = [*VISITOR, "run", json.dumps(config), ray]
        with processes.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                yield f"http://127.0.0.1:{port}", process
            finally:
                process.terminate()


def chat(base: str, **more: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "clover"}], "max_tokens": 8} | more
    body |= {"temperature": 0, "ignore_eos": True}
    return httpx.post(f"{base}/v1/chat/completions", json=body, timeout=60)


def nodes(base: str) -> dict[str, int]:
    """Processes of the nodes, by role; none while there is no replica."""
    answer = httpx.get(f"{base}/v1/cluster", timeout=60)
    if answer.status_code != 200:
        return {}
    model = answer.json()["models"][0]
    assert (model["topology"], model["executor"]) == ("pda", "ray")
    return {node["role"]: node["pid"] for node in model["nodes"]}


@pytest.mark.ray
def test_it_answers_starts_again_when_a_node_dies_and_leaves_nothing(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    base, process = server
    text = chat(base).json()["choices"][0]["message"]["content"]
    assert len(text) == 8
    told = events(chat(base, stream=True))
    pieces = [one["choices"][0]["delta"].get("content") or "" for one in told[:-1]]
    assert ("".join(pieces), told[-1]) == (text, "[DONE]")
    assert sum(map(bool, pieces)) > 1

    first = nodes(base)
    assert set(first) == {"prefill", "dense", "attention"}
    os.kill(first["dense"], signal.SIGKILL)
    wait(lambda: set(first.values()).isdisjoint(nodes(base).values() or first.values()), 120)
    assert chat(base).json()["choices"][0]["message"]["content"] == text

    started = psutil.Process(process.pid).children(recursive=True)
    assert set(nodes(base).values()) <= {one.pid for one in started}
    out, _ = process.communicate("", timeout=120)
    # Ray itself tells on the same output of what was killed.
    assert (process.returncode, out.splitlines()[-1]) == (0, "closed")
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    left = [one for pid in started for one in Path("/dev/shm").glob(f"cloverinfer-{pid.pid}-*")]
    assert not left
