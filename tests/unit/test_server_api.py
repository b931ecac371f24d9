"""The API over a fake engine: answers, streams and errors in OpenAI's forms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from tests.servers import events, refused

from cloverinfer.config import ServerConfig
from cloverinfer.core.errors import CloverError, EngineClosedError, QueueFullError, RequestError
from cloverinfer.core.request import QUEUE_TIMEOUT
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog, Chat


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    with TestClient(build_app(Catalog.single(engine, "m"))) as client:
        yield client


def complete(client: TestClient, **body: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"model": "m", "prompt": "a b c", **body})


def chat(client: TestClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi there"}]
    return client.post("/v1/chat/completions", json={"model": "m", "messages": messages, **body})


def usage(prompt: int, completion: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return counts | {
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_completion_is_whole(client: TestClient, engine: Any) -> None:
    body = complete(client, max_tokens=3, stop=["x"], seed=7, top_k=4, ignore_eos=True).json()
    assert body["object"] == "text_completion"
    assert body["model"] == "m"
    choice = {"index": 0, "text": "w0 w1 w2 ", "logprobs": None, "finish_reason": "length"}
    assert body["choices"] == [choice | {"stop_reason": None}]
    assert body["usage"] == usage(3, 3)
    sampling = engine.asked[0][1]
    assert (sampling.stop, sampling.seed, sampling.top_k) == (("x",), 7, 4)
    assert sampling.ignore_eos
    assert sampling.temperature == 1.0


def test_defaults_of_the_specification(client: TestClient, engine: Any) -> None:
    complete(client, temperature=None, user="me", metadata={"a": "b"}, stop=None)
    chat(client)
    chat(client, max_tokens=3, max_completion_tokens=2, temperature=0)
    limits = [sampling.max_tokens for _, sampling in engine.asked]
    assert limits == [16, 32 - 3, 2]
    assert engine.asked[0][1].temperature == 1.0
    assert engine.asked[2][1].temperature == 0


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_prompts_in_every_form(client: TestClient, engine: Any, prompt: Any, asked: Any) -> None:
    body = complete(client, prompt=prompt, max_tokens=2).json()
    words = engine.tokenizer.encode
    assert [one for one, _ in engine.asked] == [
        words(one) if isinstance(one, str) else one for one in asked
    ]
    assert [choice["index"] for choice in body["choices"]] == list(range(len(asked)))
    assert body["usage"]["completion_tokens"] == 2 * len(asked)


def test_echo_puts_the_prompt_first(client: TestClient, engine: Any) -> None:
    assert complete(client, echo=True, max_tokens=1).json()["choices"][0]["text"] == "a b cw0 "
    ids = engine.tokenizer.encode("x y")
    body = complete(client, echo=True, max_tokens=1, prompt=ids).json()
    assert body["choices"][0]["text"] == "x yw0 "
    parts = events(complete(client, echo=True, max_tokens=1, stream=True))
    assert [part["choices"][0]["text"] for part in parts[:-1]] == ["a b c", "w0 "]


def test_a_chat_is_whole(client: TestClient, engine: Any) -> None:
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "z"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "ok", "refusal": None, "tool_calls": None},
    ]
    body = chat(client, messages=messages, max_tokens=2).json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "w0 w1 "
    assert engine.tokenizer.decode(engine.asked[0][0]) == "system: x user: yz assistant: ok"


def test_a_chat_streams(client: TestClient) -> None:
    options = {"include_usage": True}
    parts = events(chat(client, max_tokens=2, stream=True, stream_options=options))
    assert parts[-1] == "[DONE]"
    last = parts[-2]
    assert last["choices"] == []
    assert last["usage"] == usage(3, 2)
    deltas = [part["choices"][0] for part in parts[:-2]]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert [one["delta"].get("content") for one in deltas[1:]] == ["w0 ", "w1 "]
    assert [one["finish_reason"] for one in deltas] == [None, None, "length"]
    assert {part["object"] for part in parts[:-1]} == {"chat.completion.chunk"}
    assert len({part["id"] for part in parts[:-1]}) == 1
    assert all(part["usage"] is None for part in parts[:-2])
    assert "usage" not in events(chat(client, max_tokens=1, stream=True))[0]


def test_several_prompts_stream_under_their_indices(client: TestClient) -> None:
    parts = events(complete(client, prompt=["a", "b", "c"], max_tokens=3, stream=True))
    texts = {0: "", 1: "", 2: ""}
    for part in parts[:-1]:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert set(texts.values()) == {"w0 w1 w2 "}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("best_of", 3), ("suffix", "x"), ("use_beam_search", True), ("lora_request", {"a": 1}),
        ("logits_processors", ["x"]),
    ],
)  # fmt: skip
def test_what_would_change_the_output_is_refused(client: TestClient, name: str, value: Any) -> None:
    refused(complete(client, **{name: value}), 400, name, "not supported")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["audio"]), ("functions", [{"name": "f"}]), ("reasoning_effort", "low"),
        ("prediction", {"type": "content"}), ("web_search_options", {}), ("chat_template", "x"),
    ],
)  # fmt: skip
def test_what_would_change_a_chat_is_refused(client: TestClient, name: str, value: Any) -> None:
    refused(chat(client, **{name: value}), 400, name, "not supported")


def test_neutral_values_are_taken(client: TestClient) -> None:
    neutral = {"n": 1, "logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0}
    assert complete(client, best_of=1, suffix="", **neutral).status_code == 200
    chat_only = {"tools": [], "response_format": {"type": "text"}, "logprobs": False}
    assert chat(client, tool_choice="none", **chat_only, **neutral).status_code == 200


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"max_tokens": "5"}, "max_tokens", "valid integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"temperature": -1}, "temperature", "[0, 100]"),
        ({"top_p": 0}, "top_p", "(0, 1]"),
        ({"stop": ["a"] * 65}, "stop", "64"),
        ({"stop": 3}, "stop", "valid string or"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": None}, "prompt", "valid string or"),
        ({"prompt": "a " * 40}, "prompt", "has 40 tokens"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": True}, "n", "valid integer"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "'x' is no token id"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
        ({"prompt": ["a"] * 10, "n": 128}, "n", "at most 1024"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "with stream"),
        ({"temprature": 1}, "temprature", "unknown parameter"),
    ],
)
def test_bad_values_are_refused_by_name(
    client: TestClient, body: dict[str, Any], param: str, part: str
) -> None:
    refused(complete(client, **body), 400, param, part)
    assert complete(client).status_code == 200


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages.0.tool_calls.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ],
)
def test_bad_messages_are_refused_by_name(client: TestClient, messages: Any, param: str) -> None:
    refused(chat(client, messages=messages), 400, param, "")


def test_content_other_than_text_is_refused_by_its_type(client: TestClient) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, image]}]
    refused(chat(client, messages=messages), 400, "messages.0.content.1", "'image_url' is not")


def test_a_body_that_does_not_say_that_it_is_json_is_told_how(client: TestClient) -> None:
    body = b'{"model": "m", "prompt": "a"}'
    for kind in ("application/x-www-form-urlencoded", "text/plain"):
        answer = client.post("/v1/completions", content=body, headers={"content-type": kind})
        refused(answer, 415, None, "Content-Type: application/json")
    assert client.post("/v1/completions", content=body).status_code == 415
    headers = {"content-type": "application/json; charset=utf-8"}
    assert client.post("/v1/completions", content=body, headers=headers).status_code == 200


def test_other_errors_have_the_same_form(client: TestClient) -> None:
    headers = {"content-type": "application/json"}
    bad = client.post("/v1/completions", content=b"{", headers=headers)
    refused(bad, 400, None, "not valid JSON")
    refused(complete(client, model="other"), 404, "model", "'other' does not exist")
    refused(client.get("/v1/models/other"), 404, "model", "does not exist")
    refused(client.get("/nowhere"), 404, None, "/nowhere")
    refused(client.get("/models"), 404, None, "it is at /v1/models")
    refused(client.get("/v1/completions"), 405, None, "Method Not Allowed")


def test_the_only_model_need_not_be_named(client: TestClient, engine: Any) -> None:
    body = client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    assert body["model"] == "m"
    assert chat(client, model=None, max_tokens=1).json()["model"] == "m"
    catalog = Catalog.of([engine, engine], [("a",), ("b",)], [Chat(), Chat()])
    with TestClient(build_app(catalog)) as two:
        refused(complete(two, model=None), 400, "model", "this server has 'a', 'b'")
        refused(two.post("/detokenize", json={"tokens": [1]}), 400, "model", "is missing")


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_says_when_to_come_again(
    client: TestClient, engine: Any, stream: bool
) -> None:
    engine.refusal = QueueFullError("1024 requests wait already")
    response = complete(client, stream=stream)
    refused(response, 429, None, "1024 requests")
    assert int(response.headers["retry-after"]) >= 1


def test_a_failed_engine_is_unavailable(client: TestClient, engine: Any) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    for path in ("/health", "/ready", "/metrics"):
        assert client.head(path).status_code == 200
    engine.refusal = EngineClosedError("closing")
    refused(complete(client), 503, None, "closing")
    engine.failure = "a node died"
    refused(complete(client, stream=True), 503, None, "a node died")
    refused(client.get("/health"), 503, None, "a node died")
    engine.failure, engine.refusal = None, CloverError("odd")
    refused(complete(client), 500, None, "odd")


@pytest.mark.parametrize(("how", "part"), [("fail_at", "a node died"), ("raise_at", "closed")])
def test_a_failure_within_a_stream_is_told_in_it(
    client: TestClient, engine: Any, how: str, part: str
) -> None:
    setattr(engine, how, 2)
    parts = events(complete(client, max_tokens=5, stream=True))
    assert part in parts[-1]["error"]["message"]
    assert all(one["choices"][0]["finish_reason"] is None for one in parts[:-1])
    response = complete(client, max_tokens=5)
    assert response.status_code in (500, 503)
    setattr(engine, how, 0)
    assert complete(client, max_tokens=5, stream=True).status_code in (500, 503)


@pytest.mark.parametrize("stream", [False, True])
def test_no_place_in_time_says_when_to_come_again(
    client: TestClient, engine: Any, stream: bool
) -> None:
    engine.fail_at, engine.error_code = 0, QUEUE_TIMEOUT
    response = complete(client, stream=stream)
    refused(response, 503, None, "a node died")
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("service_unavailable", "queue_timeout")
    assert int(response.headers["retry-after"]) >= 1
    engine.fail_at = 2  # it had a place, and lost it
    last = events(complete(client, max_tokens=5, stream=True))[-1]["error"]
    assert (last["type"], last["code"]) == ("service_unavailable", "queue_timeout")


def test_a_structure_that_gives_up_within_an_answer_is_the_requests_own_fault(
    client: TestClient, engine: Any
) -> None:
    param = "structured_outputs"
    engine.raise_at, engine.raised = 2, RequestError(f"{param}: cannot go on", param)
    asks = {"max_tokens": 5, "guided_regex": "w.*"}
    last = events(complete(client, stream=True, **asks))[-1]
    error = last["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "guided_regex")
    assert error["message"] == "guided_regex: cannot go on"
    refused(complete(client, **asks), 400, "guided_regex", "guided_regex: cannot go on")


def test_a_model_without_a_template_has_no_chat(client: TestClient, engine: Any) -> None:
    engine.tokenizer = None
    refused(chat(client), 400, "messages", "no chat template")


def test_models_and_version(client: TestClient) -> None:
    assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["m"]
    assert client.get("/v1/models/m").json()["id"] == "m"
    assert client.get("/version").json()["version"]


def test_a_key_is_asked_for(engine: Any) -> None:
    with TestClient(build_app(Catalog.single(engine), ServerConfig(api_key=("k",)))) as client:
        refused(client.get("/v1/models"), 401, None, "API key")
        good = {"Authorization": "Bearer k"}
        assert client.get("/v1/models", headers=good).json()["data"][0]["id"] == "fake"
        assert client.get("/health").status_code == 200
