"""``docs/server.md`` knows every endpoint, parameter, parser and setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cloverinfer.config import ChatConfig, ServerConfig
from cloverinfer.config.server import TOOL_CALL_PARSERS
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog
from cloverinfer.server.chat import ChatRequest
from cloverinfer.server.protocol import CompletionRequest

TEXT = (Path(__file__).parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
TOLD = set(re.findall(r"[\w/{}.-]+", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))


def test_every_parameter_is_told() -> None:
    known = set(CompletionRequest.model_fields) | set(ChatRequest.model_fields)
    assert known - TOLD == set()


def test_every_setting_and_parser_is_told() -> None:
    fields = {*ServerConfig.__struct_fields__, *ChatConfig.__struct_fields__, *TOOL_CALL_PARSERS}
    assert fields - TOLD == set()


def test_every_endpoint_is_told(engine: Any) -> None:
    app = build_app(Catalog.single(engine))
    paths = {path for path in app.openapi()["paths"] if "lora" not in path}
    assert len(paths) > 10
    assert paths - TOLD == set()
