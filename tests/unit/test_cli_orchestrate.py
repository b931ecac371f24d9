"""``cloverinfer orchestrate`` and ``node``: flags, and what is told before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from cloverinfer import cli
from cloverinfer.cli import node
from cloverinfer.cli import parser as command_line
from cloverinfer.config import ServerConfig
from cloverinfer.server import run

ORCHESTRATE = [
    "--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins",
    "--answer-timeout", "--api-key", "--attempts", "--body-timeout", "--breaker-faults",
    "--breaker-seconds", "--config", "--connect-timeout", "--disable-log-requests",
    "--hang-timeout", "--heartbeat-timeout", "--help", "--host", "--instance", "--max-body-mib",
    "--policy", "--port", "--quiet", "--root-path", "--shutdown-timeout", "--ssl-certfile",
    "--ssl-keyfile", "--tokenizer", "--usage-stages", "--uvicorn-log-level",
]  # fmt: skip
NODE = [
    "--advertise-url", "--config", "--help", "--interval", "--kv-address", "--orchestrator",
    "--role", "--url",
]  # fmt: skip
"""Frozen: scripts depend on them. Add a flag here when you add it there; never take one away."""
REQUIRED = {"orchestrate": [], "node": ["--url", "http://a:1", "--role", "both"]}


def parser_of(command: str) -> Any:
    return command_line.parse([command, *REQUIRED[command]]).parser


@pytest.mark.parametrize(("command", "flags"), [("orchestrate", ORCHESTRATE), ("node", NODE)])
def test_the_flags_are_frozen(command: str, flags: list[str]) -> None:
    actions = parser_of(command)._actions
    known = {flag for action in actions for flag in action.option_strings}
    known = {flag for flag in known if flag[2:5] != "no-" and flag != "-h"}
    assert known - set(flags) == set(), "new flags: add them to the list"
    assert set(flags) - known == set(), "flags have gone"


def test_every_flag_of_orchestrate_is_grouped_and_tells_its_default() -> None:
    parser = parser_of("orchestrate")
    for group in parser._action_groups[2:]:
        assert group.title
        for action in group._group_actions:
            told = "default" in f"{action.help}"
            known = action.dest in ("quiet", "server.ssl_certfile")
            assert told or known, f"{action.option_strings} does not tell its default"
    loose = [flag for action in parser._optionals._group_actions for flag in action.option_strings]
    assert set(loose) == {"-h", "--help", "--config"}


def test_flags_reach_the_application(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    served: list[Any] = []

    def serve(app: Any, sock: Any, server: ServerConfig, announce: Any, lifespan: str) -> None:
        served.append((app, server, lifespan))

    monkeypatch.setattr(run, "serve", serve)
    monkeypatch.setenv("CLOVER_SERVER_SERVED_MODEL_NAME", "x")
    flags = ["--port", "0", "--policy", "prefix_aware", "--api-key", "k", "--quiet"]
    named = ["--instance", "prefill=http://a:1", "--instance", "decode=http://b:2#c:3"]
    assert cli.main(["orchestrate", *flags, *named]) == 0
    ((app, server, lifespan),) = served
    assert (server.api_key, lifespan) == (("k",), "on")
    assert app.state.door is not None
    assert "served_model_name changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "part"),
    [
        (["orchestrate", "--instance", "a:1"], "of the form both=URL"),
        (["orchestrate", "--instance", "both=http://"], "http://HOST:PORT"),
        (["orchestrate", "--instance", "decode=http://a:1#b"], "of the form both=URL"),
        (["orchestrate", "--attempts", "17"], "from 1 to 16"),
        (["orchestrate", "--tokenizer", "/nowhere"], "is no file"),
        (["node", "--url", "a:1", "--role", "both"], "http://HOST:PORT"),
        (["node", "--url", "http://a:1", "--role", "decode"], "--kv-address goes with"),
        (["node", "--url", "http://a:1", "--role", "decode", "--kv-address", "b"], "HOST:PORT"),
        (["node", "--url", "http://a:1", "--role", "both", "--kv-address", "b:1"], "no other role"),
        (["node", "--url", "http://a:1", "--role", "both", "--interval", "0"], "above 0"),
        (["node", "--url", "http://a:1", "--role", "both", "--orchestrator", "x"], "not 'x'"),
    ],
)
def test_bad_input_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, command: list[str], part: str
) -> None:
    def runs(*_: Any, **__: Any) -> None:
        raise AssertionError("it runs")

    monkeypatch.setattr(run, "serve", runs)
    monkeypatch.setattr(node, "_run", runs)
    port = ["--port", "0"] if command[0] == "orchestrate" else []
    assert cli.main([*command, *port]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert part in err
