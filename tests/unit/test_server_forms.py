"""Bodies in both directions against the OpenAI specification's own field names."""

from __future__ import annotations

import itertools
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from openai import types
from openai.types import chat as chat_types
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel
from tests.servers import events, refused

from cloverinfer.core.sampling import SamplingParams
from cloverinfer.server.app import build_app
from cloverinfer.server.catalog import Catalog
from cloverinfer.server.chat import ChatRequest
from cloverinfer.server.protocol import CompletionRequest

ADDED = {"stop_reason", "token_ids", "prompt_token_ids", "prompt_logprobs"}
"""Fields that other servers have beside OpenAI's."""


@pytest.fixture
def client(engine: Any) -> Iterator[TestClient]:
    with TestClient(build_app(Catalog.single(engine, "m"))) as client:
        yield client


def complete(client: TestClient, **body: Any) -> httpx.Response:
    fields = {"model": "m", "prompt": "a b c", "max_tokens": 4, **body}
    return client.post("/v1/completions", json=fields)


def chat(client: TestClient, **body: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "hi there"}]
    fields = {"model": "m", "messages": messages, "max_tokens": 4, **body}
    return client.post("/v1/chat/completions", json=fields)


def conforms(kind: type[BaseModel], body: Any) -> None:
    """``body`` has every field that the specification requires, and no others, at any depth."""
    parsed = kind.model_validate(body, strict=True)
    _only_known(parsed)


def _only_known(value: Any) -> None:
    if isinstance(value, BaseModel):
        unknown = set(value.model_extra or ()) - ADDED
        assert not unknown, f"{type(value).__name__} has no {unknown}"
        for name in type(value).model_fields:
            _only_known(getattr(value, name))
    elif isinstance(value, list):
        for one in value:
            _only_known(one)


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_conform(client: TestClient, n: int, logprobs: int | None) -> None:
    echo = logprobs is None
    conforms(types.Completion, complete(client, n=n, logprobs=logprobs, echo=echo).json())
    options = {"include_usage": True}
    stream = complete(client, n=n, logprobs=logprobs, stream=True, stream_options=options)
    for part in events(stream)[:-1]:
        for choice in part["choices"]:
            # The library's type has no null here, which the specification's streams have.
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        conforms(types.Completion, part)


@pytest.mark.parametrize("logprobs", [None, True])
@pytest.mark.parametrize("n", [1, 3])
def test_chats_conform(client: TestClient, n: int, logprobs: bool | None) -> None:
    top = 2 if logprobs else None
    body = chat(client, n=n, logprobs=logprobs, top_logprobs=top).json()
    conforms(chat_types.ChatCompletion, body)
    options = {"include_usage": True}
    stream = chat(client, n=n, logprobs=logprobs, stream=True, stream_options=options)
    for part in events(stream)[:-1]:
        conforms(chat_types.ChatCompletionChunk, part)


def test_models_conform(client: TestClient) -> None:
    card = client.get("/v1/models/m").json()
    assert types.Model.model_validate(card, strict=True).id == "m"
    assert client.get("/v1/models").json() == {"object": "list", "data": [card]}


def joined(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def _names(params: Any) -> set[str]:
    return set(typing.get_type_hints(params.CompletionCreateParamsBase)) | {"stream"}


def test_every_parameter_of_the_specification_is_known() -> None:
    assert _names(completion_params) - set(CompletionRequest.model_fields) == set()
    assert _names(chat_params) - set(ChatRequest.model_fields) == set()


def test_messages_of_the_specification_are_known() -> None:
    known = {name for name, _ in ChatRequest.model_fields["messages"].annotation.__args__[  # type: ignore[union-attr]
        0
    ].model_fields.items()}  # fmt: skip
    for role in ("System", "Developer", "User", "Assistant", "Tool"):
        params = getattr(chat_types, f"ChatCompletion{role}MessageParam")
        assert set(params.__annotations__) <= known


def test_n_answers_of_each_prompt(client: TestClient, engine: Any) -> None:
    body = complete(client, prompt=["a", "b"], n=2, max_tokens=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [sampling.n for _, sampling in engine.asked] == [2, 2]
    assert body["usage"]["prompt_tokens"] == 2  # a prompt counts once
    assert body["usage"]["completion_tokens"] == 8
    texts = dict.fromkeys(range(4), "")
    parts = events(complete(client, prompt=["a", "b"], n=2, max_tokens=2, stream=True))[:-1]
    for part in parts:
        texts[part["choices"][0]["index"]] += part["choices"][0]["text"]
    assert texts == dict.fromkeys(range(4), "w0 w1 ")
    openings = events(chat(client, n=3, stream=True))[:3]
    assert [part["choices"][0]["index"] for part in openings] == [0, 1, 2]
    assert {part["choices"][0]["delta"]["role"] for part in openings} == {"assistant"}


def test_log_probabilities_of_a_completion(client: TestClient, engine: Any) -> None:
    whole = complete(client, logprobs=2).json()["choices"][0]["logprobs"]
    assert engine.asked[0][1].logprobs == 2
    assert whole["tokens"] == ["w0 ", "w1 ", "w2 ", "bytes:\\xf0\\x9f"]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["top_logprobs"][0] == {"w0 ": -0.5, "w1 ": -1.5}
    assert whole["text_offset"] == [0, 3, 6, 9]
    parts = events(complete(client, logprobs=2, stream=True))[:-1]
    pieces = [part["choices"][0]["logprobs"] for part in parts]
    for name in whole:
        assert joined(piece[name] for piece in pieces) == whole[name]


def test_log_probabilities_of_a_chat(client: TestClient, engine: Any) -> None:
    whole = chat(client, logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]
    assert engine.asked[0][1].logprobs == 2
    last = whole["content"][3]
    assert (last["token"], last["bytes"]) == ("bytes:\\xf0\\x9f", [0xF0, 0x9F])
    assert [one["token"] for one in whole["content"][0]["top_logprobs"]] == ["w0 ", "w1 "]
    parts = events(chat(client, logprobs=True, top_logprobs=2, stream=True))[1:-1]
    pieces = [part["choices"][0]["logprobs"]["content"] for part in parts]
    assert joined(pieces) == whole["content"]
    assert chat(client, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert chat(client).json()["choices"][0]["logprobs"] is None
    refused(chat(client, top_logprobs=2), 400, "top_logprobs", "needs logprobs: true")


def test_impossible_tokens_have_a_number_that_json_can_say(client: TestClient, engine: Any) -> None:
    record = engine._chunk(0, 1, [0]).logprobs[0]
    engine._chunk = lambda *_: (
        type(engine)
        ._chunk(engine, 0, 1, [0], 0)
        .__class__("x", [0], "stop", logprobs=[type(record)(0, float("-inf"), 1, [], [])])
    )
    assert complete(client, logprobs=0).json()["choices"][0]["logprobs"]["token_logprobs"] == [
        -9999.0
    ]


def test_every_parameter_of_the_core_is_reached(client: TestClient, engine: Any) -> None:
    asked = {
        "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 4, "stop": ["x"],
        "stop_token_ids": [5], "ignore_eos": True, "min_tokens": 1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "bad_words": ["no"],
        "include_stop_str_in_output": True, "skip_special_tokens": False, "n": 2, "logprobs": 3,
        "logit_bias": {"7": -5}, "max_tokens": 4,
    }  # fmt: skip
    assert complete(client, **asked, priority=3, cache_salt="s").status_code == 200
    sampling = engine.asked[0][1]
    for name, value in asked.items():
        told = {7: -5.0} if name == "logit_bias" else value
        got = getattr(sampling, name)
        assert (list(got) if isinstance(got, tuple) else got) == told
    assert engine.options == (3, "s")
    rest = set(SamplingParams.__struct_fields__) - set(asked)
    assert rest <= {"prompt_logprobs", "structured_outputs"}


def test_the_log_bias_goes_by_token_ids(client: TestClient) -> None:
    for key in ("x", "1_0", " 1", "-1", "٣", "1" * 11):
        refused(complete(client, logit_bias={key: 1}), 400, "logit_bias", "no token id")


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_with_echo_is_the_prompt(client: TestClient, engine: Any, stream: bool) -> None:
    answer = complete(client, max_tokens=0, echo=True, prompt=["a  b", "c"], stream=stream)
    if stream:
        parts = events(answer)
        assert parts[-1] == "[DONE]"
        choices = [part["choices"][0] for part in parts[:-1]]
    else:
        choices = answer.json()["choices"]
        assert answer.json()["usage"]["completion_tokens"] == 0
        assert answer.json()["usage"]["prompt_tokens"] == 3
    assert [one["text"] for one in choices] == ["a  b", "c"]
    assert {one["finish_reason"] for one in choices} == {"length"}
    unseen = complete(client, max_tokens=0, echo=True, prompt=[9], stream=stream)
    choice = events(unseen)[0]["choices"][0] if stream else unseen.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert engine.asked == []
    refused(complete(client, max_tokens=0), 400, "max_tokens", "with echo")
    refused(chat(client, max_tokens=0), 400, "max_tokens", "at least 1")


@pytest.mark.parametrize("limit", [0, 2])
def test_an_echo_with_log_probabilities_has_the_prompts(
    client: TestClient, engine: Any, limit: int
) -> None:
    body = complete(client, echo=True, logprobs=2, max_tokens=limit, n=2).json()
    assert (engine.asked[0][1].prompt_logprobs, engine.asked[0][1].max_tokens) == (2, limit)
    if limit == 0:
        return  # the fake answers once
    for choice in body["choices"]:
        scores = choice["logprobs"]
        assert choice["text"] == "a b cw0 w1 "
        assert scores["tokens"] == ["w0 ", "w1 ", "w2 ", "w0 ", "w1 "]
        assert scores["token_logprobs"] == [None, -0.25, -0.25, -0.5, -0.5]
        assert scores["top_logprobs"][0] is None
        assert scores["top_logprobs"][1]["w1 "] == -0.25
        assert scores["text_offset"] == [0, 3, 6, 9, 12]


@pytest.mark.parametrize(("limit", "n"), [(0, 1), (2, 2)])
def test_a_streamed_echo_has_the_same_log_probabilities(
    client: TestClient, limit: int, n: int
) -> None:
    asked = {"prompt": ["a b c", "d"], "echo": True, "logprobs": 2, "max_tokens": limit, "n": n}
    parts = [part["choices"][0] for part in events(complete(client, **asked, stream=True))[:-1]]
    for whole in complete(client, **asked).json()["choices"]:
        own = [part for part in parts if part["index"] == whole["index"]]
        assert "".join(part["text"] for part in own) == whole["text"]
        assert own[-1]["finish_reason"] == whole["finish_reason"] == "length"
        for name, values in whole["logprobs"].items():
            assert joined(part["logprobs"][name] for part in own) == values


def test_log_probabilities_of_a_prompt(client: TestClient, engine: Any) -> None:
    answer = complete(client, prompt_logprobs=1)
    first, second, _ = answer.json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["1"] == {"logprob": -0.25, "rank": 1, "decoded_token": "w1 "}
    assert second["3"]["rank"] == 2
    assert len(chat(client, prompt_logprobs=1, n=2).json()["prompt_logprobs"]) == 3
    assert engine.asked[0][1].prompt_logprobs == 1
    for stream in (complete, chat):
        answer = stream(client, prompt_logprobs=0, stream=True)
        refused(answer, 400, "prompt_logprobs", "cannot be streamed")
    refused(complete(client, prompt_logprobs=-1), 400, "prompt_logprobs", "from 0 to 20")


def test_one_token_is_one_token(client: TestClient, engine: Any) -> None:
    assert complete(client, max_tokens=1).json()["usage"]["completion_tokens"] == 1
    assert chat(client, max_completion_tokens=1).json()["usage"]["completion_tokens"] == 1


def test_usage_may_come_with_every_event(client: TestClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    parts = events(complete(client, stream=True, stream_options=options))[:-1]
    assert [part["usage"]["completion_tokens"] for part in parts] == [1, 2, 3, 4, 4]
    assert parts[-1]["choices"] == []


def test_token_ids_come_where_asked_for(client: TestClient) -> None:
    choice = complete(client, return_token_ids=True).json()["choices"][0]
    assert choice["token_ids"] == [0, 1, 2, 3]
    parts = events(complete(client, return_token_ids=True, stream=True))[:-1]
    assert joined(part["choices"][0]["token_ids"] for part in parts) == [0, 1, 2, 3]
    told = [choice, *(part["choices"][0] for part in parts if "prompt_token_ids" in str(part))]
    told += [chat(client, return_token_ids=True).json()]
    parts = events(chat(client, return_token_ids=True, stream=True, n=2))[:-1]
    told += [part for part in parts if "prompt_token_ids" in part]
    assert [len(one["prompt_token_ids"]) for one in told] == [3, 3, 3, 3]


def test_prompts_may_be_cut_to_their_end(client: TestClient, engine: Any) -> None:
    body = complete(client, truncate_prompt_tokens=2, echo=True, max_tokens=1).json()
    assert body["choices"][0]["text"] == "b cw0 "
    assert engine.asked[0][0] == engine.tokenizer.encode("b c")
    refused(complete(client, truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "from 1")


def test_too_long_a_prompt_is_told_with_the_numbers(client: TestClient, engine: Any) -> None:
    answer = complete(client, prompt="a " * 32)
    refused(answer, 400, "prompt", "has 32 tokens")
    assert "32 tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    # What is surely too long is not read, but where it will be cut.
    read = len(engine.tokenizer.words)
    answer = complete(client, prompt="b" * 3201)
    refused(answer, 400, "prompt", "has 3201 characters")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    answer = chat(client, messages=[{"role": "user", "content": "b" * 3201}])
    refused(answer, 400, "messages", "characters")
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(engine.tokenizer.words) == read
    messages = [{"role": "user", "content": "a " * 40}]
    refused(chat(client, messages=messages), 400, "messages", "has 41 tokens")
    assert complete(client, prompt="a " * 31, max_tokens=1).status_code == 200
    assert complete(client, prompt="a " * 32, max_tokens=0, echo=True).status_code == 200
    assert len(engine.asked) == 1
    assert complete(client, prompt="b" * 3201, truncate_prompt_tokens=2).status_code == 200


def test_the_structure_of_answers_reaches_the_core_or_is_refused(
    client: TestClient, engine: Any
) -> None:
    schema = {"type": "object"}
    named = {"name": "x", "schema": schema}
    bodies: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"guided_json": schema}, {"guided_regex": "a+"}, {"guided_choice": ["a", "b"]},
        {"structured_outputs": {"json": schema}},
    ]  # fmt: skip
    core = "structured_outputs" in SamplingParams.__struct_fields__
    for body in bodies:
        answer = chat(client, **body)
        if core:
            assert answer.status_code == 200
            assert engine.asked[-1][1].structured_outputs is not None
        else:
            refused(answer, 400, next(iter(body)), "not supported by this server yet")
    assert chat(client, response_format={"type": "text"}).status_code == 200
    both = {"guided_regex": "a", "guided_choice": ["a"]}
    refused(chat(client, **both), 400, "guided_choice", "exclude each other")
    missing = {"type": "json_schema"}
    refused(chat(client, response_format=missing), 400, "response_format", "is missing")
    refused(complete(client, guided_json="{"), 400, "guided_json", "not valid JSON")
    two = {"structured_outputs": {"regex": "a", "choice": ["a"]}}
    refused(complete(client, **two), 400, "structured_outputs", "exactly one")


def test_a_chat_has_the_special_tokens_of_its_template_alone(client: TestClient) -> None:
    assert chat(client, add_special_tokens=False).status_code == 200
    messages = [{"role": "user", "content": "hi"}]
    asked = {"messages": messages, "add_special_tokens": True}
    for answer in (chat(client, **asked), client.post("/tokenize", json=asked)):
        refused(answer, 400, "add_special_tokens", "template writes them itself")


def test_chats_end_as_they_are_told_to(client: TestClient, engine: Any) -> None:
    engine.tokenizer.ends = True

    def prompt(**body: Any) -> str:
        assert chat(client, **body).status_code == 200
        return str(engine.tokenizer.decode(engine.asked[-1][0]))

    assert prompt() == "user: hi there assistant:"
    assert prompt(add_generation_prompt=False) == "user: hi there end"
    assert prompt(continue_final_message=True) == "user: hi there"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    refused(chat(client, **both), 400, "add_generation_prompt", "exclude each other")
    prompt(chat_template_kwargs={"enable_thinking": False})
    assert engine.tokenizer.variables == {"enable_thinking": False}
    wrong = {"messages": []}
    refused(chat(client, chat_template_kwargs=wrong), 400, "chat_template_kwargs.messages", "own")


def test_tokens_and_back(client: TestClient, engine: Any) -> None:
    body = client.post("/tokenize", json={"prompt": "a b a", "return_token_strs": True}).json()
    assert body == {
        "count": 3, "max_model_len": 32, "tokens": [0, 1, 0], "token_strs": ["a", "b", "a"],
    }  # fmt: skip
    assert client.post("/detokenize", json={"tokens": [1, 0]}).json() == {"prompt": "b a"}
    messages = [{"role": "user", "content": "a"}]
    chat = client.post("/tokenize", json={"model": "m", "messages": messages}).json()
    assert engine.tokenizer.decode(chat["tokens"]) == "user: a"
    refused(client.post("/tokenize", json={}), 400, "prompt", "either prompt or messages")
    refused(client.post("/tokenize", json={"model": "x", "prompt": ""}), 404, "model", "'x'")
    refused(client.post("/detokenize", json={"tokens": [-1]}), 400, "tokens", "not in [0")
    refused(client.post("/detokenize", json={"tokens": [10**30]}), 400, "tokens", "not in [0")


def test_the_cluster_is_shown(client: TestClient, engine: Any) -> None:
    (model,) = client.get("/v1/cluster").json()["models"]
    assert (model["name"], model["failure"]) == ("m", None)
    assert model["nodes"] == engine.nodes()
    assert model["transport"]["name"] == "inproc"
