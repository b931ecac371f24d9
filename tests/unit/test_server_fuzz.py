"""Whatever a client sends, no handler fails: fuzzed bodies, paths and headers give no 5xx."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.conftest import FakeEngine

from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog, Chat
from cloverinfer.server.chat import ChatRequest
from cloverinfer.server.protocol import CompletionRequest
from cloverinfer.server.utilities import DetokenizeRequest, TokenizeRequest

FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
POSTS = {
    "/v1/completions": ({"model": "m", "prompt": "a b", "max_tokens": 2}, CompletionRequest),
    "/v1/chat/completions": (
        {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        ChatRequest,
    ),
    "/tokenize": ({"prompt": "a"}, TokenizeRequest),
    "/detokenize": ({"tokens": [0]}, DetokenizeRequest),
}
TEXT = st.text(max_size=8) | st.sampled_from(["\ud800", "\x00", "a" * 5000, "{{", "system", "text"])
NUMBERS = (
    st.integers(-2, 200)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**40, 1e308, float("inf"), float("nan"), -0.0])
    | st.floats()
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(TEXT | st.sampled_from(["type", "function", "name"]), inner, max_size=4)
    ),
    max_leaves=8,
)
TOOLS = st.sampled_from(
    [
        [{"type": "function", "function": {"name": "f"}}],
        [{"type": "function", "function": {"name": "f", "parameters": {"$defs": {"a": 1}}}}] * 2,
        [{"type": "function", "function": {"name": "f", "parameters": {"type": 3}}}],
    ]
)
NEAR: dict[str, Any] = {
    "tools": TOOLS,
    "tool_choice": st.sampled_from(
        ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}]
    ),
    "logprobs": st.booleans() | st.integers(0, 20),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 9).map(str) | TEXT, NUMBERS, max_size=3),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": TEXT}
        ),
        max_size=3,
    ),
    "response_format": st.sampled_from(
        [
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5, "$ref": 1}}},
        ]
    ),
}
"""Values close enough to right ones to get past the types."""


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    chat = Chat(auto_tools=True, tool_call_parser="hermes")
    app = build_app(Catalog.single(FakeEngine(), "m", chat))
    with TestClient(app) as client:  # which raises what a handler does not catch
        yield client


def checked(answer: httpx.Response) -> None:
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]


def send(client: TestClient, path: str, body: Any) -> None:
    # Lone surrogates travel as escapes, and numbers that JSON lacks as Python writes them.
    data = json.dumps(body).encode()
    checked(client.post(path, content=data, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", POSTS)
@FUZZ
@given(data=st.data())
def test_odd_values_of_known_fields(client: TestClient, path: str, data: st.DataObject) -> None:
    good, kind = POSTS[path]
    fields = [field.alias or name for name, field in kind.model_fields.items()]
    body = dict(good)
    for name in data.draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        body[name] = data.draw(NEAR[name] | JSON if name in NEAR else JSON)
    for name in data.draw(st.lists(TEXT, max_size=1)):
        body[name] = data.draw(JSON)
    if body.get("n") is None or not isinstance(body["n"], int) or body["n"] < 5:
        send(client, path, body)


@pytest.mark.parametrize("path", POSTS)
@FUZZ
@given(body=JSON)
def test_any_json(client: TestClient, path: str, body: Any) -> None:
    send(client, path, body)


@FUZZ
@given(st.sampled_from(sorted(POSTS)), st.binary(max_size=30), st.sampled_from(["", "text/x"]))
def test_any_bytes(client: TestClient, path: str, body: bytes, kind: str) -> None:
    checked(client.post(path, content=body, headers={"content-type": kind or "application/json"}))


@FUZZ
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "PATCH"]),
    st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12),
)
def test_any_path(client: TestClient, method: str, path: str) -> None:
    answer = client.request(method, f"/v1/models/{path.replace('#', '').replace('?', '')}")
    assert answer.status_code < 500


def test_depth_and_size_do_no_harm(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    for body in (
        b"[" * 100_000,
        b'{"model": "m", "prompt": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 6_000 + b"}",
        b'{"model": "m", "guided_json": '
        + b'{"a":' * 900
        + b"1"
        + b"}" * 900
        + b', "prompt": "a"}',
        b'{"model": "m", "prompt": "a", "metadata": ' + b"[" * 900 + b"]" * 900 + b"}",
    ):
        checked(client.post("/v1/completions", content=body, headers=headers))
