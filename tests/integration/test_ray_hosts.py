"""One cluster over two hosts of a Ray cluster, made of network namespaces."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from tests.network_hosts import Host, hosts
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams

pytestmark = pytest.mark.ray
PORT = 6379
RAY = [sys.executable, "-m", "ray.scripts.scripts"]


def environment() -> dict[str, str]:
    """Without proxies, which would be asked for the other host."""
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("proxy")}
    return env | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def start_ray(host: Host, env: Mapping[str, str], room: Mapping[str, int], *words: str) -> None:
    command = host.command(
        *RAY,
        "start",
        f"--node-ip-address={host.address}",
        "--num-cpus=1",
        "--object-store-memory=80000000",
        f"--resources={json.dumps(room)}",
        *words,
    )
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


Engine = tuple[Host, dict[str, str]]


@pytest.fixture(scope="module")
def head() -> Iterator[Engine]:
    """The first of two hosts, and the environment to join their Ray with: room for a prefill node
    there, for a dense and an attention node on the other."""
    env = environment()
    with (
        hosts(2) as (first, second),
        tempfile.TemporaryDirectory(prefix="clv", dir="/tmp") as folder,
    ):
        try:
            start_ray(
                first,
                env,
                {"clover_prefill": 1},
                "--head",
                f"--port={PORT}",
                f"--temp-dir={folder}",
                "--include-dashboard=false",
            )
            address = f"{first.address}:{PORT}"
            room = {"clover_dense": 1, "clover_attention": 1}
            start_ray(second, env, room, f"--address={address}")
            yield first, env | {"RAY_ADDRESS": address}
        finally:
            for host in (first, second):
                host.end_processes()


def visit(at: Engine, model: str, prompts: list[list[int]], **counts: int) -> dict[str, Any]:
    host, env = at
    words = [
        sys.executable,
        "-m",
        "tests.ray_visitor",
        model,
        json.dumps(counts),
        json.dumps(prompts),
    ]
    done = subprocess.run(
        host.command(*words), env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.timeout(400)
def test_nodes_run_where_there_is_room_and_give_the_same_tokens(head, tmp_path):
    model = str(make_tiny("llama", tmp_path))
    prompts = [[5, 6, 7, 8, 9], list(range(1, 41))]
    alone = ModelConfig(model_path=model, dtype="float32")
    with LLM(alone, topology="colocated", executor="local") as llm:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        wanted = [out.token_ids for out in llm.generate(prompts, params)]
    answer = visit(head, model, prompts)
    assert answer["tokens"] == wanted
    hosts_of = {name: where.split(":")[1] for name, where in answer["addresses"].items()}
    assert hosts_of == {
        "prefill-0": "//198.18.0.1",
        "dense-0": "//198.18.0.2",
        "attention-0": "//198.18.0.2",
    }
    # What the first engine had taken is free again.
    assert visit(head, model, prompts)["tokens"] == wanted


@pytest.mark.timeout(200)
def test_more_nodes_than_there_is_room_for_are_refused(head, tmp_path):
    refused = visit(head, str(make_tiny("llama", tmp_path)), [[1]], num_attention_nodes=2)
    assert "room for 1 attention nodes, not 2" in refused["error"]
    assert "clover_attention" in refused["error"]


@pytest.mark.timeout(200)
def test_nobody_at_the_address_of_the_cluster_is_told_at_once(head, tmp_path):
    host, env = head
    elsewhere = host, env | {"RAY_ADDRESS": f"{host.address}:1"}
    answer = visit(elsewhere, str(make_tiny("llama", tmp_path)), [[1]])
    assert "cannot join the Ray cluster at RAY_ADDRESS 198.18.0.1:1" in answer["error"]
