"""The commands over a fake engine: what goes where, and how they end."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests import processes

from cloverinfer import __version__, cli
from cloverinfer.core.errors import NodeStartError

CONFTEST = Path(__file__).resolve().parent.parent / "conftest.py"
RUN = f"""
import importlib.util, sys, types
spec = importlib.util.spec_from_file_location("fakes", {str(CONFTEST)!r})
fakes = importlib.util.module_from_spec(spec)
sys.modules["fakes"] = fakes
spec.loader.exec_module(fakes)
class Slow(fakes.FakeEngine):
    max_model_len = 10**6
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.delay = 0.01
    def close(self):
        print(f"closed, aborted {{self.aborted}}", file=sys.stderr, flush=True)
module = types.ModuleType("llm")
module.AsyncLLM = Slow
sys.modules["cloverinfer.orchestrator.llm"] = module
from cloverinfer.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""Runs the command line in a process of its own over a slow fake engine."""


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, *arguments]
    pipe = subprocess.PIPE
    return processes.start(command, stdout=pipe, stderr=pipe, bufsize=1)


def test_text_goes_to_stdout_and_the_rest_to_stderr(engines: list[Any], capsys: Any) -> None:
    assert cli.main(["generate", "a b", "--max-tokens", "3"]) == 0
    out, err = capsys.readouterr()
    assert out == "w0 w1 w2 \n"
    assert "nodes are ready" in err
    assert "500.00 ms" in err
    assert "stages.queue" in err
    assert "MiB in" in err
    assert "1.50" in err
    assert engines[0].closed == 1
    prompt, sampling = engines[0].asked[0]
    assert (prompt, sampling.temperature, sampling.max_tokens) == ("a b", 0, 3)
    cluster = engines[0].cluster
    assert (cluster.topology, cluster.executor) == ("pda", "local")


def test_quiet_leaves_only_the_text(engines: list[Any], capsys: Any) -> None:
    assert cli.main(["generate", "a", "--max-tokens", "1", "--quiet"]) == 0
    assert capsys.readouterr() == ("w0 \n", "")


def test_json_is_one_object(engines: list[Any], capsys: Any) -> None:
    command = ["generate", "a", "--max-tokens", "2", "--json", "--topology", "pd"]
    assert cli.main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    keys = {"text", "token_ids", "finish_reason", "metrics", "topology", "nodes", "transport"}
    assert set(answer) == keys
    assert answer["transport"]["name"] == "inproc"
    assert (answer["text"], answer["token_ids"]) == ("w0 w1 ", [0, 1])
    assert (answer["finish_reason"], answer["topology"]) == ("length", "pd")
    assert answer["metrics"]["ttft"] == 0.5
    assert answer["nodes"][0]["role"] == "dense"


def test_flags_reach_the_engine(engines: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("cache: {block_size: 8, num_blocks: 9}\ncluster: {executor: process}")
    flags = [
        "--config", str(path), "--block-size", "16", "--prefill", "2", "--dense", "3",
        "--attention", "4", "--dtype", "float32", "--model", "x", "--no-enable-chunked-prefill",
        "--stop", "u", "--stop", "v", "--seed", "5", "--top-p", "0.5", "--ignore-eos", "--chat",
    ]  # fmt: skip
    assert cli.main(["generate", "hi", "--quiet", *flags]) == 0
    model, cluster = engines[0].model, engines[0].cluster
    assert (model.model_path, model.dtype) == ("x", "float32")
    assert (cluster.cache.block_size, cluster.cache.num_blocks) == (16, 9)
    counts = (cluster.num_prefill_workers, cluster.num_decode_dense_nodes)
    assert (*counts, cluster.num_attention_nodes) == (2, 3, 4)
    assert cluster.executor == "process"
    assert cluster.scheduler.enable_chunked_prefill is False
    prompt, sampling = engines[0].asked[0]
    assert engines[0].tokenizer.decode(prompt) == "user: hi"
    assert (sampling.stop, sampling.seed, sampling.top_p) == (("u", "v"), 5, 0.5)
    assert sampling.ignore_eos


def test_sampling_flags_become_parameters(engines: list[Any], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array"}')
    flags = [
        "--min-tokens", "2", "--min-p", "0.25", "--presence-penalty", "1", "--logprobs", "3",
        "--frequency-penalty", "-0.5", "--repetition-penalty", "1.5", "--bad-word", "no",
    ]  # fmt: skip
    for more in (["--json-schema", str(schema)], ["--choice", "a", "--choice", "b"], []):
        assert cli.main(["generate", "hi", "--quiet", *flags, *more]) == 0
    by_schema, by_choice, plain = (engine.asked[0][1] for engine in engines)
    assert (plain.min_tokens, plain.min_p, plain.logprobs) == (2, 0.25, 3)
    assert (plain.presence_penalty, plain.frequency_penalty) == (1, -0.5)
    assert (plain.repetition_penalty, plain.bad_words) == (1.5, ("no",))
    assert plain.structured_outputs is None
    assert (by_schema.structured_outputs.kind, by_schema.structured_outputs.text) == (
        "json",
        '{"type": "array"}',
    )
    assert by_choice.structured_outputs.choice == ["a", "b"]


def test_a_dash_reads_stdin(engines: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert cli.main(["generate", "-", "--quiet", "--max-tokens", "1"]) == 0
    assert engines[0].asked[0][0] == "from stdin"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--topology", "pd", "--attention", "1"], "'pd' has no attention nodes"),
        (["--topology", "colocated", "--prefill", "1"], "'colocated' has no prefill nodes"),
        (["--max-tokens", "-1"], "max_tokens must be an integer from 0 to 2147483647, not -1"),
        (["--temperature", "-1"], "temperature must be"),
        (["--regex", "a", "--json-object"], "structured_outputs needs exactly one of"),
        (["--grammar", "/nowhere.lark"], "--grammar: cannot read /nowhere.lark"),
        (["--stop", ""], "stop must be"),
        (["--block-size", "24"], "cache.block_size must be a power of two"),
        (["--config", "/nowhere.yaml"], "cannot read the configuration file /nowhere.yaml"),
        (["--executor", "process", "--transport", "inproc"], "cluster.transport must be"),
    ],
)
def test_bad_input_is_told_before_an_engine_starts(
    engines: list[Any], capsys: Any, arguments: list[str], part: str
) -> None:
    assert cli.main(["generate", "a", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ")
    assert part in err
    assert engines == []


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["generate", "a", "--topology", "star"], "choose from"),
        (["generate", "a", "--temp", "1"], "unknown flag"),
        (["generate"], "prompt"),
        ([], "required"),
        (["serve", "--port", "http"], "invalid int value"),
        (["bench", "serve", "--extra-body", "[1]"], "a JSON object is needed, not '[1]'"),
        (["bench", "serve", "--extra-body", "{"], "not valid JSON"),
        (["bench", "serve", "--metric-percentiles", "50,p99"], "from 0 to 100"),
        (["bench", "serve", "--metric-percentiles", "101"], "from 0 to 100"),
    ],
)
def test_bad_flags_are_one_line(capsys: Any, arguments: list[str], part: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert part in err


@pytest.mark.parametrize("prompt", ["", "bad \udc80"])
def test_prompts_that_are_no_text_are_refused(engines: list[Any], prompt: str) -> None:
    assert cli.main(["generate", prompt]) == 2
    assert engines == []


def test_what_the_engine_refuses_is_bad_input(engines: list[Any], capsys: Any) -> None:
    assert cli.main(["generate", "a " * 40, "--quiet"]) == 2
    assert capsys.readouterr() == ("", "error: 40 tokens where 32 fit\n")
    assert engines[0].closed == 1


def test_a_failure_half_way_is_told(
    engines: list[Any], engine: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    begin = type(engine).__init__

    def failing(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        self.fail_at = 1

    monkeypatch.setattr(type(engine), "__init__", failing)
    assert cli.main(["generate", "a", "--quiet", "--json"]) == 1
    assert capsys.readouterr() == ("", "error: a node died\n")
    assert engines[0].closed == 1


def test_nodes_that_cannot_start_are_a_failure(
    engine: Any, engines: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def broken(self: Any, *arguments: Any) -> None:
        raise NodeStartError("dense-0: out of\nmemory")

    monkeypatch.setattr(type(engine), "__init__", broken)
    assert cli.main(["generate", "a", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: dense-0: out of memory\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_in_order(number: signal.Signals, status: int) -> None:
    with start("generate", "a", "--max-tokens", "100000") as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "w0"
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "closed, aborted 1" in err
    assert "Traceback" not in err


def test_sigterm_ends_a_command_on_an_event_loop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(60)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with start("bench", "serve", "--base-url", url) as process:
            connection, _ = silent.accept()
            with connection:
                connection.settimeout(60)
                assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
                time.sleep(0.2)  # the loop has nothing to do but wait for an answer
                process.send_signal(signal.SIGTERM)
                _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err == ""


def test_a_closed_pipe_ends_quietly() -> None:
    with start("generate", "a", "--max-tokens", "100000", "--quiet") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == "w0"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(60)
    assert process.returncode == 141
    assert err == "closed, aborted 1\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve_is_ready_serves_and_ends_in_order(number: signal.Signals, status: int) -> None:
    with start("serve", "--port", "0", "--served-model-name", "m") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready: http://127.0.0.1:")
        url = f"{line.removeprefix('ready: ').strip()}/v1/completions"
        body = {"model": "m", "prompt": "a", "max_tokens": 2}
        assert httpx.post(url, json=body).json()["choices"][0]["text"] == "w0 w1 "
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert "closed, aborted 0" in err
    assert "Traceback" not in err


def test_version(capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"cloverinfer {__version__}\n"


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys, cloverinfer.cli as cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'ray', 'fastapi', 'rich', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert "--topology" in done.stdout
