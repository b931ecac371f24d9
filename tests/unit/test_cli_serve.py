"""``cloverinfer serve``: its flags, several models, and what is told before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.test_cli import start

from cloverinfer import cli
from cloverinfer.cli import parser as command_line
from cloverinfer.config import Config, load_config
from cloverinfer.config.load import SECTIONS
from cloverinfer.core.errors import ConfigError
from cloverinfer.server import run
from cloverinfer.server.catalog import load_chat

FLAGS = [
    "--advertise-host", "--allow-credentials", "--allowed-headers", "--allowed-methods",
    "--allowed-origins", "--api-key", "--async-scheduling", "--attention", "--attention-backend",
    "--batch-invariant", "--bind-host", "--block-size", "--body-timeout", "--chat-template",
    "--checksum", "--config", "--dense", "--device",
    "--disable-log-requests", "--dtype", "--enable-auto-tool-choice", "--enable-chunked-prefill",
    "--enable-prefix-caching", "--executor", "--gpu-memory-utilization", "--help", "--host",
    "--kv-cache-dtype", "--load-format", "--lowering", "--max-body-mib", "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-seqs", "--max-queue", "--memory-gib", "--model", "--model-impl", "--num-blocks",
    "--num-wavefronts", "--port", "--prefill", "--prefill-block-size", "--prefill-dtype",
    "--prompt-attention",
    "--quantization", "--queue-timeout", "--quiet", "--room-timeout", "--root-path", "--seed",
    "--served-model-name", "--shutdown-timeout", "--ssl-certfile", "--ssl-keyfile", "--staging-mib",
    "--start-timeout", "--step-timeout", "--tcp-streams", "--threads", "--tool-call-parser",
    "--topology", "--transport", "--uvicorn-log-level",
]  # fmt: skip
"""Frozen: scripts depend on them. Add a flag here when you add it there; never take one away."""


def serve_parser() -> Any:
    return command_line.parse(["serve"]).parser


def test_the_flags_are_frozen() -> None:
    known = {flag for action in serve_parser()._actions for flag in action.option_strings}
    known = {flag for flag in known if flag[2:5] != "no-" and flag != "-h"}
    assert known - set(FLAGS) == set(), "new flags: add them to FLAGS"
    assert set(FLAGS) - known == set(), "flags have gone"


def test_every_flag_is_grouped_and_tells_its_default() -> None:
    parser = serve_parser()
    for group in parser._action_groups[2:]:
        assert group.title
        for action in group._group_actions:
            text = f"{action.help}"
            told = "default" in text or action.dest in ("quiet", "server.ssl_certfile")
            assert told, f"{action.option_strings} does not tell its default"
    loose = [flag for action in parser._optionals._group_actions for flag in action.option_strings]
    assert set(loose) == {"-h", "--help", "--config"}


def test_help_has_the_groups(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    out = capsys.readouterr().out
    for title in ("server:", "front door:", "chat and tools:", "model:", "cluster:"):
        assert f"\n{title}\n" in out


def test_every_flag_is_a_key_of_the_configuration() -> None:
    for action in serve_parser()._actions:
        section, dot, field = action.dest.partition(".")
        if dot:
            assert field in SECTIONS[section].__struct_fields__


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Applications that would have been served, with the settings."""
    seen: list[tuple[Any, Any]] = []

    def serve(app: Any, sock: Any, settings: Any, announce: Any) -> None:
        seen.append((app, settings))

    monkeypatch.setattr(run, "serve", serve)
    return seen


def test_flags_reach_the_server(
    engines: list[Any],
    served: list[Any],
    tmp_path: Path,
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    flags = [
        "some/model", "--port", "0", "--served-model-name", "a", "b", "--api-key", "k1", "k2",
        "--max-model-len", "77", "--no-enable-prefix-caching", "--disable-log-requests",
        "--allowed-origins", '["http://x", "http://y"]', "--allowed-methods", "GET", "POST",
        "--root-path", "/llm", "--uvicorn-log-level", "error", "--max-body-mib", "2",
        "--shutdown-timeout", "0", "--chat-template", str(template), "--tool-call-parser",
        "mistral", "--enable-auto-tool-choice",
    ]  # fmt: skip
    assert cli.main(["serve", *flags]) == 0
    (app, settings), (engine,) = served[0], engines
    assert (engine.model.model_path, engine.model.max_model_len) == ("some/model", 77)
    assert engine.cluster.cache.enable_prefix_caching is False
    assert (settings.served_model_name, settings.api_key) == (("a", "b"), ("k1", "k2"))
    assert settings.allowed_origins == ("http://x", "http://y")
    assert settings.allowed_methods == ("GET", "POST")
    assert (settings.root_path, settings.log_requests) == ("/llm", False)
    assert (settings.uvicorn_log_level, settings.max_body_mib) == ("error", 2)
    assert settings.shutdown_timeout == 0
    assert app.state.door is not None
    assert engine.closed == 1


def test_a_list_of_keys_comes_from_the_environment() -> None:
    config = load_config(environ={"CLOVER_SERVER_API_KEY": "k1, k2,"})
    assert config.server.api_key == ("k1", "k2")
    assert "k1" not in repr(config)
    assert load_config(overrides={"server": {"api_key": "one"}}).server.api_key == ("one",)
    with pytest.raises(ConfigError) as caught:
        load_config(overrides={"server": {"api_key": ["k1", ""]}}, environ={})
    assert "server.api_key must be non-empty" in str(caught.value)
    assert "k1" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["m", "--model", "n"], "give the model once"),
        (["--gpu-memory-utilization", "2"], "must be a number above 0, at most 1"),
        (["--enable-auto-tool-choice"], "needs chat.tool_call_parser"),
        (["--chat-template", "no such file"], "neither a file nor a Jinja template"),
        (["--chat-template", "{% if %}"], "does not parse"),
        (["--ssl-keyfile", "k"], "go together"),
        (["--root-path", "x"], "begins with /"),
        (["--max-body-mib", "0"], "above 0"),
        (["--body-timeout", "-1"], "above 0"),
        (["--shutdown-timeout", "-1"], "from 0 to"),
    ],
)
def test_bad_flags_are_told_before_a_model_is_loaded(
    engines: list[Any],
    capsys: Any,
    flags: list[str],
    part: str,
) -> None:
    assert cli.main(["serve", "--port", "0", *flags]) == 2
    assert part in capsys.readouterr().err
    assert engines == []


def test_a_template_is_taken_as_it_stands_or_from_a_file(tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = load_config(overrides={"chat": {"chat_template": text}}, environ={})
    assert load_chat(config.chat).template == text
    file = tmp_path / "t.jinja"
    file.write_text(text)
    config = load_config(overrides={"chat": {"chat_template": str(file)}}, environ={})
    assert load_chat(config.chat).template == text


# ---- several models

TWO = """
server: {port: 0}
cache: {block_size: 16}
models:
  - {name: small, model: {model_path: a}, cluster: {topology: pd, num_prefill_workers: 2}}
  - {name: [big, large], model: {model_path: b}, cache: {block_size: 64},
     chat: {tool_call_parser: hermes, enable_auto_tool_choice: true}}
"""


def two(tmp_path: Path, text: str = TWO) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(text)
    return path


def test_each_model_has_settings_of_its_own(tmp_path: Path) -> None:
    config = load_config(two(tmp_path), {"cluster": {"executor": "process"}}, environ={})
    small, big = config.models
    assert (small.names, big.names) == (("small",), ("big", "large"))
    assert (small.model.model_path, big.model.model_path) == ("a", "b")
    assert (small.cluster.topology, big.cluster.topology) == ("pd", "pda")
    assert (small.cluster.cache.block_size, big.cluster.cache.block_size) == (16, 64)
    assert {one.cluster.executor for one in config.models} == {"process"}
    assert (small.chat.tool_call_parser, big.chat.tool_call_parser) == (None, "hermes")
    assert Config().models[0].names == ()


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("models: []", "at least one"),
        ("models: 3", "must be a list"),
        ("models: [3]", "models[0] must hold a name and sections"),
        ("models: [{name: 3}]", "models[0].name must be a string"),
        ("models: [{name: a, server: {port: 1}}]", "server is a section of the whole file"),
        ("models: [{name: a, modle: {}}]", "unknown section 'modle'; did you mean model?"),
        ("models: [{name: a, model: {dtyp: x}}]", "models[0]: unknown key 'dtyp'"),
        ("models: [{name: a}, {name: a}]", "two models are named 'a'"),
        ("models: [{}, {}]", "two models are named 'smollm2-135m'"),
        ("{server: {served_model_name: x}, models: [{}]}", "give each a name of its own there"),
        ("models: [{cache: {block_size: 3}}]", "models[0]: cache.block_size must be"),
    ],
)
def test_bad_lists_of_models_are_refused_by_place(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(two(tmp_path, text), environ={})
    assert part in str(caught.value)


def test_a_model_for_all_excludes_a_list(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"CLOVER_MODEL_MODEL_PATH: .* cannot be set"):
        load_config(two(tmp_path), environ={"CLOVER_MODEL_MODEL_PATH": "x"})
    with pytest.raises(ConfigError, match=r"model\.model_path cannot be set"):
        load_config(two(tmp_path), {"model": {"model_path": "x"}}, environ={})


@pytest.mark.parametrize("command", [["generate", "x"], ["bench", "offline"]])
def test_commands_that_run_one_model_take_no_list(
    engines: list[Any], tmp_path: Path, capsys: Any, command: list[str]
) -> None:
    assert cli.main([*command, "--config", str(two(tmp_path))]) == 2
    assert "lists several models (small, big)" in capsys.readouterr().err
    assert engines == []


def test_a_list_of_one_model_is_that_model(engines: list[Any], tmp_path: Path) -> None:
    path = two(tmp_path, "models: [{model: {model_path: a}, cache: {block_size: 64}}]")
    assert cli.main(["generate", "x", "--quiet", "--config", str(path)]) == 0
    assert engines[0].model.model_path == "a"
    assert engines[0].cluster.cache.block_size == 64


def test_models_are_served_side_by_side(tmp_path: Path) -> None:
    with start("serve", "--config", str(two(tmp_path))) as process:
        assert process.stdout is not None
        base = process.stdout.readline().removeprefix("ready: ").strip()
        names = [one["id"] for one in httpx.get(f"{base}/v1/models").json()["data"]]
        assert names == ["small", "big", "large"]
        for name in names:
            body = {"model": name, "prompt": "a", "max_tokens": 1}
            assert httpx.post(f"{base}/v1/completions", json=body).json()["model"] == name
        missing = httpx.post(f"{base}/v1/completions", json=body | {"model": "a"})
        assert missing.status_code == 404
        process.terminate()
        _, err = process.communicate(timeout=20)
    assert process.returncode == 143
    assert err.count("closed, aborted 0") == 2
    assert err.count(" POST /v1/completions 200 model=") == 3


def test_the_failure_of_one_is_not_the_others(engine: Any) -> None:
    from fastapi.testclient import TestClient

    from cloverinfer.server.app import build_app
    from cloverinfer.server.catalog import Catalog, Chat

    other = type(engine)()
    catalog = Catalog.of([engine, other], [("a",), ("b",)], [Chat(), Chat()])
    engine.failure = "dense-0: gone"
    with TestClient(build_app(catalog)) as client:
        body = {"prompt": "x", "max_tokens": 1}
        assert client.post("/v1/completions", json=body | {"model": "a"}).status_code == 503
        assert client.post("/v1/completions", json=body | {"model": "b"}).status_code == 200
        assert client.get("/health").status_code == 200
        assert client.get("/ready").status_code == 503
        states = [one["failure"] for one in client.get("/v1/cluster").json()["models"]]
        assert states == ["dense-0: gone", None]
        other.failure = "gone as well"
        assert client.get("/health").status_code == 503
    with pytest.raises(ConfigError, match="same name"):
        Catalog.of([engine, other], [("a",), ("a",)], [Chat(), Chat()])
