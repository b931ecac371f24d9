"""The server over the real engine, by the official client, as a process of its own."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server():
    command = [sys.executable, "-m", "cloverinfer.cli", "serve", "--port", "0", "--topology", "pda"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            match = re.search(r"ready: (http://\S+)", line)
            assert match, line
            base_url = f"{match[1]}/v1"
            with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (0, 143)
        finally:
            process.kill()


def test_models(server):
    assert [model.id for model in server.models.list()] == ["smollm2-135m"]


def test_completion_streamed_and_whole_agree(server):
    fields = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = server.completions.create(**fields)
    parts = list(server.completions.create(stream=True, **fields))
    assert "Paris" in whole.choices[0].text
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_chat(server):
    stream = server.chat.completions.create(
        model="smollm2-135m",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    parts = list(stream)
    text = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
    assert "Paris" in text
    assert parts[-1].usage.completion_tokens > 0


def test_stop_strings_are_not_shown(server):
    fields = {"model": "smollm2-135m", "prompt": "1, 2, 3, 4,", "temperature": 0, "max_tokens": 40}
    plain = server.completions.create(**fields).choices[0].text
    stop = plain[6:9]
    stopped = server.completions.create(stop=stop, **fields).choices[0]
    assert stopped.text == plain[: plain.index(stop)]
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": ""}, openai.BadRequestError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": "hot"}, openai.BadRequestError),
        ({"n": 0}, openai.BadRequestError),
        ({"extra_body": {"top_k": 10**30}}, openai.BadRequestError),
        ({"prompt": [10**30], "echo": True}, openai.BadRequestError),
        ({"prompt": "word " * 9000}, openai.BadRequestError),
    ],
)
def test_bad_requests_are_refused_and_it_serves_on(server, fields, error):
    good = {"model": "smollm2-135m", "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    with pytest.raises(error):
        server.completions.create(**(good | fields))
    assert server.completions.create(**good).choices[0].text


def test_the_familiar_benchmark_script(server):
    script = Path(__file__).parents[2] / "scripts" / "benchmark_client"
    host = f"{server.base_url.host}:{server.base_url.port}"
    flags = ["--prompt", PROMPT, "--mode", "throughput", "--num", "3", "--tokens", "5"]
    command = [sys.executable, str(script), "--host", host, *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "requests: 3 of 3" in done.stdout
    for name, unit in (("throughput", "tokens/s"), ("latency", "ms"), ("TTFT", "ms")):
        assert re.search(rf"^{name}: .*\d {unit}", done.stdout, re.MULTILINE), done.stdout
