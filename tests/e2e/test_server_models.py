"""Two models behind one server, each with node processes of its own, one of which dies."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest
import yaml
from tests import processes
from tests.tiny_models import make_tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models = [
        {"name": name, "model": {"model_path": str(make_tiny(family, folder / name))}}
        for name, family in (("one", "llama"), ("two", "qwen2"))
    ]
    models[1]["cluster"] = {"topology": "colocated"}
    config = folder / "two.yaml"
    shared = {"executor": "process", "topology": "pda", "threads": 1}
    config.write_text(
        yaml.safe_dump(
            {
                "server": {"port": 0},
                "model": {"dtype": "float32"},
                "cluster": shared,
                "cache": {"num_blocks": 32, "block_size": 16},
                "models": models,
            }
        )
    )
    command = [sys.executable, "-m", "cloverinfer.cli", "serve", "--config", str(config)]
    with processes.start(command, stdout=subprocess.PIPE) as process:
        try:
            line = process.stdout.readline()
            assert re.search(r"ready: http://\S+", line), line
            yield line.removeprefix("ready: ").strip()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 143
        finally:
            process.kill()


def ask(base, model, **fields):
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, **fields}
    return httpx.post(f"{base}/v1/completions", json=body, timeout=60)


def test_each_serves_until_its_own_node_dies(base):
    assert [one["id"] for one in httpx.get(f"{base}/v1/models").json()["data"]] == ["one", "two"]
    for name in ("one", "two"):
        answer = ask(base, name, return_token_ids=True, temperature=0).json()
        assert answer["usage"]["completion_tokens"] == 4
        assert len(answer["choices"][0]["token_ids"]) == 4
    assert httpx.get(f"{base}/ready").status_code == 200
    clusters = httpx.get(f"{base}/v1/cluster").json()["models"]
    assert [one["topology"] for one in clusters] == ["pda", "colocated"]
    assert len({node["pid"] for one in clusters for node in one["nodes"]}) == 4

    dense = next(node for node in clusters[0]["nodes"] if node["role"] == "dense")
    body = {"model": "one", "prompt": [5], "max_tokens": 400, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True, "n": 8}
    with httpx.stream("POST", f"{base}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        assert '"token_ids"' in next(lines)
        os.kill(dense["pid"], signal.SIGKILL)
        rest = [line for line in lines if line]
    assert dense["name"] in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
    assert not any('"finish_reason":"' in line for line in rest)
    deadline = time.monotonic() + 60
    while httpx.get(f"{base}/ready").status_code == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gone = ask(base, "one")
    assert gone.status_code == 503
    assert dense["name"] in gone.json()["error"]["message"]
    assert ask(base, "two").status_code == 200
    assert httpx.get(f"{base}/health").status_code == 200
    states = [one["failure"] is None for one in httpx.get(f"{base}/v1/cluster").json()["models"]]
    assert states == [False, True]


def test_text_needs_a_tokenizer_which_these_lack(base):
    for path, body in (
        ("/v1/completions", {"model": "two", "prompt": "text"}),
        ("/v1/chat/completions", {"model": "two", "messages": [{"role": "user", "content": "x"}]}),
        ("/tokenize", {"model": "two", "prompt": "x"}),
        ("/detokenize", {"model": "two", "tokens": [1]}),
        ("/v1/completions", {"model": "two", "prompt": [1], "stop": "x"}),
        ("/v1/completions", {"model": "two", "prompt": [1], "echo": True}),
    ):
        answer = httpx.post(base + path, json=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    scores = ask(base, "two", logprobs=2).json()["choices"][0]["logprobs"]
    assert len(scores["tokens"]) == 4
    assert scores["tokens"][0].startswith("token_id:")
    for token_id in (96, 10**6):
        assert ask(base, "two", prompt=[token_id]).status_code == 400
