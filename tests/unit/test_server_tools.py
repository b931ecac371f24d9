"""Tool calls: what parsers find in texts however they are cut, and chats that call tools."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from tests.servers import events, refused

from cloverinfer.config.server import TOOL_CALL_PARSERS
from cloverinfer.core.errors import ConfigError
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog, Chat
from cloverinfer.server.render import whole_calls
from cloverinfer.server.tools import create_parser
from cloverinfer.server.tools.base import ToolParser
from cloverinfer.server.tools.forced import NamedParser, RequiredParser, required_schema

NASTY = {"q": 'a "quoted" } ] \\ </tool_call> [TOOL_CALLS] \u00e9\U0001f600', "n": [1, {"m": None}]}
TOOL = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "finds",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}


def run_parser(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, Any]]]:
    """Content, and names with arguments, of a text that comes in pieces."""
    parsed = [parser.add(piece) for piece in pieces] + [parser.flush()]
    calls = whole_calls([call for one in parsed for call in one.calls])
    assert len({call["id"] for call in calls}) == len(calls) == parser.called
    named = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls]
    return "".join(one.content for one in parsed), named


def hermes(name: str, arguments: Any) -> str:
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{body}\n</tool_call>"


def llama(name: str, arguments: Any) -> str:
    return json.dumps({"name": name, "parameters": arguments})


CALLS = [("find", NASTY), ("g", {})]
CASES = [
    ("hermes", "\n".join(hermes(*one) for one in CALLS), "", CALLS),
    ("hermes", f"Let me see.\n\n{hermes(*CALLS[0])}\n", "Let me see.", CALLS[:1]),
    ("hermes", f"a{hermes('f', {})} b {hermes('g', {})} c", "a b c", [("f", {}), ("g", {})]),
    ("hermes", "no call: <tool_cal and < tool", "no call: <tool_cal and < tool", []),
    ("hermes", "<tool_call>\nnot json</tool_call> x", "<tool_call>\nnot json</tool_call> x", []),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', '<tool_call>{"nam": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ("hermes", '<tool_call>{"name": "f"} x', '<tool_call>{"name": "f"} x', []),
    ("hermes", "trailing space \n", "trailing space \n", []),
    ("llama3_json", llama(*CALLS[0]), "", CALLS[:1]),
    ("llama3_json", "\n<|python_tag|>" + "; ".join(llama(*c) for c in CALLS), "", CALLS),
    ("llama3_json", 'It is {"name": "f"}', 'It is {"name": "f"}', []),
    ("llama3_json", ' {"answer": 42} yes', ' {"answer": 42} yes', []),
    ("llama3_json", '{"name": "f", "param', '{"name": "f", "param', []),
    ("llama3_json", "<|python", "<|python", []),
    ("llama3_json", '{"name": "f"} and more', " and more", [("f", {})]),
    ("mistral", "[TOOL_CALLS]" + json.dumps([{"name": n, "arguments": a} for n, a in CALLS]), "",
     CALLS),
    ("mistral", f"ok [TOOL_CALLS] find{json.dumps(NASTY)}[TOOL_CALLS]g{{}}", "ok", CALLS),
    ("mistral", "[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ("mistral", "[TOOL_CALLS][1, 2] x", "[TOOL_CALLS][1, 2] x", []),
    ("mistral", "[TOOL_CALLS]f(x)", "[TOOL_CALLS]f(x)", []),
    ("mistral", "[TOOL_ is text", "[TOOL_ is text", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(
    name: str, text: str, content: str, calls: list[Any]
) -> None:
    whole = run_parser(create_parser(name), [text])
    assert whole == (content, calls)
    assert run_parser(create_parser(name), list(text)) == whole
    for cut in range(len(text)):
        assert run_parser(create_parser(name), [text[:cut], text[cut:]]) == whole


PARTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "}"}}', "[TOOL_CALLS]",
        '{"name": "g", "parameters": {}}', "[", "]", "{", "}", '"', "\\", "; ", " ", "\n", "text",
        "<|python_tag|>", "f", '[{"name": "h", "arguments": {}}]', "\U0001f600",
    ]
)  # fmt: skip


@given(st.sampled_from(TOOL_CALL_PARSERS), st.lists(PARTS, max_size=8), st.data())
def test_cutting_changes_nothing_and_nothing_but_space_is_lost(
    name: str, parts: list[str], data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = run_parser(create_parser(name), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run_parser(create_parser(name), pieces) == whole
    if not whole[1]:
        assert whole[0] == text


def test_text_that_is_no_call_is_not_held_back() -> None:
    parser = create_parser("hermes")
    assert [parser.add(piece).content for piece in ("a", " b", " <", "tool", "s>")] == [
        "a", " b", "", "", " <tools>",
    ]  # fmt: skip
    parser = create_parser("llama3_json")
    assert [parser.add(piece).content for piece in ("I", " am", " {")] == ["I", " am", " {"]


def test_the_ids_are_of_the_models_kind() -> None:
    parser = create_parser("mistral")
    (call,) = parser.add("[TOOL_CALLS]f{}").calls
    assert re.fullmatch("[A-Za-z0-9]{9}", str(call.id))
    (call,) = create_parser("hermes").add(hermes("f", {})).calls
    assert re.fullmatch("call_[0-9a-f]{24}", str(call.id))


def test_an_unknown_parser_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="hermes, llama3_json, mistral, not 'x'"):
        create_parser("x")


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_forced_calls_are_the_text_itself(size: int) -> None:
    text = json.dumps(NASTY)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run_parser(NamedParser("find"), pieces) == ("", [("find", NASTY)])
    text = json.dumps([{"name": n, "parameters": a} for n, a in CALLS])
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    assert run_parser(RequiredParser(), pieces) == ("", CALLS)


def test_the_schema_of_required_calls_keeps_references_right() -> None:
    class Function:
        def __init__(self, name: str, parameters: Any) -> None:
            self.name, self.parameters = name, parameters

    shared = {"$defs": {"P": {"type": "string"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}
    schema = required_schema([Function("f", shared), Function("g", None)], one_at_most=True)
    assert schema["$defs"] == {"P": {"type": "string"}}
    assert schema["maxItems"] == 1
    names = [one["properties"]["name"]["enum"] for one in schema["items"]["anyOf"]]
    assert names == [["f"], ["g"]]
    assert "$defs" not in schema["items"]["anyOf"][0]["properties"]["parameters"]
    other = {"$defs": {"P": {"type": "integer"}}}
    with pytest.raises(ValueError, match="define 'P' differently"):
        required_schema([Function("f", shared), Function("g", other)], one_at_most=False)


# ---- over HTTP


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    chat = Chat(auto_tools=True, tool_call_parser="hermes")
    with TestClient(build_app(Catalog.single(engine, "m", chat))) as client:
        yield client


def ask(client: TestClient, **body: Any) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "m", "messages": messages, "tools": [TOOL], **body}
    return client.post("/v1/chat/completions", json=fields)


def test_a_call_is_answered_whole_and_streamed(client: TestClient, engine: Any) -> None:
    text = f"Look: {hermes('find', {'q': 'x'})}\n{hermes('find', {'q': 'y'})}"
    engine.pieces = [text[i : i + 7] for i in range(0, len(text), 7)]
    (choice,) = ask(client).json()["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "Look:")
    calls = choice["message"]["tool_calls"]
    assert [json.loads(one["function"]["arguments"]) for one in calls] == [{"q": "x"}, {"q": "y"}]
    assert {one["type"] for one in calls} == {"function"}
    assert engine.tokenizer.variables["tools"] == [TOOL]

    parts = [part["choices"][0] for part in events(ask(client, stream=True))[:-1]]
    assert "".join(part["delta"].get("content") or "" for part in parts) == "Look:"
    deltas = [call for part in parts for call in part["delta"].get("tool_calls", [])]
    assert [(one["index"], one["function"]["name"]) for one in deltas] == [(0, "find"), (1, "find")]
    assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["tool_calls"]

    one = ask(client, parallel_tool_calls=False).json()["choices"][0]["message"]["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in one] == [{"q": "x"}]


def test_an_answer_without_a_call_is_text(client: TestClient, engine: Any) -> None:
    engine.pieces = ["just", " text"]
    (choice,) = ask(client).json()["choices"]
    assert choice["message"]["content"] == "just text"
    assert choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    engine.pieces = [hermes("find", {})]
    plain = ask(client, tool_choice="none").json()["choices"][0]["message"]
    assert plain["content"] == engine.pieces[0]
    assert "tools" not in engine.tokenizer.variables


def test_a_call_cut_off_by_the_length_is_no_call(client: TestClient, engine: Any) -> None:
    engine.pieces = [hermes("find", {})[:20]]
    (choice,) = ask(client).json()["choices"]
    assert choice["message"]["content"] == engine.pieces[0]
    assert choice["finish_reason"] == "stop"


def test_results_of_calls_reach_the_template(client: TestClient, engine: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "found"}]},
    ]
    assert ask(client, messages=messages).status_code == 200
    told = engine.tokenizer.messages
    assert told[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": 1}}
    assert told[1]["content"] == ""
    assert told[2] == {"role": "tool", "content": "found", "tool_call_id": "c1"}
    call["function"]["arguments"] = "{"
    refused(ask(client, messages=messages), 400, "messages.1.tool_calls", "not valid JSON")
    messages[0]["tool_calls"] = [call]
    refused(ask(client, messages=messages), 400, "messages.0.tool_calls", "only the assistant")


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tool_choice": "maybe"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": [{"type": "code"}]}, "tools.0.type", "'function'"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "required"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice",
         "exclude each other"),
    ],
)  # fmt: skip
def test_bad_tools_are_refused_by_name(
    client: TestClient, body: dict[str, Any], param: str, part: str
) -> None:
    refused(ask(client, **body), 400, param, part)


def test_calls_of_its_own_accord_must_be_switched_on(engine: Any) -> None:
    with TestClient(build_app(Catalog.single(engine, "m"))) as client:
        refused(ask(client), 400, "tool_choice", "--enable-auto-tool-choice")
        assert ask(client, tool_choice="none").status_code == 200
