"""Clients of others, unmodified, on the real server: ``make test-clients`` installs and runs them.

Nothing is fetched from a hub: model, tokenizer and task are local.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cloverinfer.config.cluster import ModelConfig
from cloverinfer.models import resolve_model

CLIENTS = Path(__file__).parents[2] / "build" / "clients"
MODEL = "smollm2-135m"
LONGEST = 256
"""Tokens of prompt and output: what schemathesis asks for is soon over."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TASK = """\
task: clover_local
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {data}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""
HOOKS = f"""\
import schemathesis

@schemathesis.hook
def map_body(context, body):
    if isinstance(body, dict) and "model" in body:
        body["model"] = {MODEL!r}
        if len(body) <= 4:
            if "prompt" in body:
                body["prompt"] = "Hello"
            if "messages" in body:
                body["messages"] = [{{"role": "user", "content": "Hello"}}]
    return body
"""
"""What schemathesis makes up has no model of ours, so that every body would be a 404; and hardly a
prompt that is answered: short bodies get one."""
QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " banana"], "answer": 0},
    {"question": "The sun rises in the", "choices": [" shoe", " east"], "answer": 1},
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "cloverinfer.cli", "serve", MODEL, "--port", "0", "--quiet"]
    command += ["--topology", "colocated", "--max-model-len", str(LONGEST), "--memory-gib", "0.25"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ready: "), line
            yield line.strip().removeprefix("ready: ")
        finally:
            process.terminate()
            process.wait(60)


def program(client: str, name: str) -> str:
    venv = CLIENTS / client
    if not (venv / "made-from.txt").exists():
        pytest.skip(f"{client} is not installed: make test-clients does it, where it can be had")
    return str(venv / "bin" / name)


def run(*command: str, timeout: float, folder: Path, **more: str) -> str:
    """The client's output; it must end well."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
        cwd=folder,
        env={**os.environ, **OFFLINE, **more, "HF_HOME": str(folder / "hf")},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def tokenizer() -> str:
    return str(resolve_model(ModelConfig(model_path=MODEL)).path)


def test_curl(url: str, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 3, "stream": True}
    send = ["-sS", "--fail", "-N", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    out = run("curl", *send, "-d", json.dumps(body), timeout=60, folder=tmp_path)
    events = [line.removeprefix("data: ") for line in out.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "text_completion"
    models = json.loads(
        run("curl", "-sS", "--fail", f"{url}/v1/models", timeout=60, folder=tmp_path)
    )
    assert models["data"][0]["id"] == MODEL


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(url: str, tmp_path: Path, backend: str, endpoint: str) -> None:
    vllm = program("vllm", "vllm")
    load = ["--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8"]
    out = run(
        vllm, "bench", "serve", "--base-url", url, "--backend", backend, "--endpoint", endpoint,
        "--model", MODEL, "--tokenizer", tokenizer(), *load, "--num-prompts", "6", "--ignore-eos",
        "--save-result", "--result-filename", "result.json", "--ready-check-timeout-sec", "30",
        timeout=170,
        folder=tmp_path,
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result.get("failed", 0)) == (6, 0), out[-2000:]
    assert result["total_output_tokens"] == 48
    assert result["mean_ttft_ms"] > 0


def test_lm_eval(url: str, tmp_path: Path) -> None:
    lm_eval = program("lm-eval", "lm_eval")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    (tmp_path / "local.yaml").write_text(TASK.format(data=data))
    model = f"model={MODEL},base_url={url}/v1/completions,tokenizer={tokenizer()}"
    out = run(
        lm_eval, "--model", "local-completions", "--model_args", f"{model},num_concurrent=2",
        "--include_path", str(tmp_path), "--tasks", "clover_local",
        "--output_path", str(tmp_path / "out"), timeout=170, folder=tmp_path,
    )  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    scores = json.loads(results.read_text())["results"]["clover_local"]
    assert scores["acc,none"] == 1.0, out[-2000:]


@pytest.mark.timeout(1000)
def test_schemathesis(url: str, tmp_path: Path) -> None:
    """Bodies made of the server's own OpenAPI document: none gets a 5xx, none hangs."""
    schemathesis = program("schemathesis", "schemathesis")
    (tmp_path / "hooks.py").write_text(HOOKS)
    run(
        schemathesis, "run", f"{url}/openapi.json", "--checks", "not_a_server_error",
        "--phases", "examples,coverage,fuzzing", "--max-examples", "30", "--seed", "1",
        "--request-timeout", "60", "--generation-deterministic", "--no-color",
        timeout=900, folder=tmp_path, SCHEMATHESIS_HOOKS="hooks",
    )  # fmt: skip
    answers = statuses(url)
    assert not [key for key in answers if key[1].startswith("5")], answers
    for route in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        # The bodies came past the first check, and were refused and answered alike.
        seen = {status for path, status in answers if path == route}
        assert {"200", "400"} <= seen, answers


def statuses(url: str) -> dict[tuple[str, str], float]:
    """HTTP requests by route and status, as the server counted them."""
    text = httpx.get(f"{url}/metrics", timeout=60).text
    families = {one.name: one for one in text_string_to_metric_families(text)}
    samples = families["cloverinfer_http_requests"].samples
    counts: dict[tuple[str, str], float] = {}
    for sample in samples:
        if sample.name.endswith("_total"):
            key = sample.labels["route"], sample.labels["status"]
            counts[key] = counts.get(key, 0.0) + sample.value
    return counts
