"""What the server promises of the core, over real nodes: forms, structures, ends, cancelling."""

import contextlib
import json
import time

import httpx
import openai
import pytest
from tests.servers import events, refused, serving

from cloverinfer import AsyncLLM, ClusterConfig, ModelConfig
from cloverinfer.server.catalog import Catalog

MODEL = "m"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def base():
    with AsyncLLM("smollm2-135m", ClusterConfig(executor="local", topology="pda")) as llm:
        with serving(Catalog.single(llm, MODEL)) as (address, _):
            yield address


@pytest.fixture
def exact():
    """In float32: bfloat16 rounds differently where a prompt is read at once and where it grows."""
    model = ModelConfig(model_path="smollm2-135m", dtype="float32")
    with AsyncLLM(model, ClusterConfig(executor="local", topology="pda")) as llm:
        with serving(Catalog.single(llm, MODEL)) as (address, _):
            yield address


def post(base, path="/v1/completions", **body):
    given = {"prompt": PROMPT} if path == "/v1/completions" else {}
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 8, **given, **body}
    return httpx.post(base + path, json=fields, timeout=60)


def text_of(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def steps(base, role):
    (model,) = httpx.get(f"{base}/v1/cluster").json()["models"]
    return sum(node["steps"] for node in model["nodes"] if node["role"] == role)


def token(base, text):
    answer = httpx.post(f"{base}/tokenize", json={"prompt": text}).json()
    (one,) = answer["tokens"]
    return one


def test_a_first_token_that_ends_the_sequence_is_an_end_and_nothing_is_decoded(base):
    eos = token(base, "<|im_end|>")
    before = steps(base, "dense")
    for stream in (False, True):
        answer = post(base, logit_bias={str(eos): 100}, stream=stream)
        if stream:
            (last,) = [part for part in events(answer) if part != "[DONE]"]
        else:
            last = answer.json()
            assert last["usage"]["completion_tokens"] == 1
        assert last["choices"][0]["finish_reason"] == "stop"
        assert last["choices"][0]["text"] == ""
    assert steps(base, "dense") == before


def test_one_token_and_none(base):
    before = steps(base, "dense")
    one = post(base, max_tokens=1).json()
    assert one["usage"]["completion_tokens"] == 1
    assert one["choices"][0]["finish_reason"] == "length"
    assert steps(base, "dense") == before
    none = post(base, max_tokens=0, echo=True).json()
    assert none["choices"][0]["text"] == PROMPT
    assert none["usage"]["completion_tokens"] == 0
    assert none["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]


def test_stop_strings_stop_whatever_the_prompt_is_made_of(base):
    plain = text_of(post(base, max_tokens=24))
    middle = len(plain) // 2
    stop = plain[middle : middle + 7]
    expected = plain[: plain.index(stop)]
    ids = httpx.post(f"{base}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    for prompt in (PROMPT, ids):
        answer = post(base, prompt=prompt, stop=stop, max_tokens=24).json()["choices"][0]
        assert (answer["text"], answer["stop_reason"]) == (expected, stop)
        parts = events(post(base, prompt=prompt, stop=[stop], max_tokens=24, stream=True))[:-1]
        shown = [part["choices"][0]["text"] for part in parts]
        assert "".join(shown) == expected
        assert parts[-1]["choices"][0]["finish_reason"] == "stop"
    kept = text_of(post(base, stop=stop, max_tokens=24, include_stop_str_in_output=True))
    assert kept == expected + stop


def test_answers_of_one_prompt_differ_and_repeat_with_a_seed(base):
    fields = {"n": 3, "seed": 5, "temperature": 1.5}
    first, again = (post(base, **fields).json()["choices"] for _ in range(2))
    texts = [choice["text"] for choice in first]
    assert texts == [choice["text"] for choice in again]
    assert len(set(texts)) == 3
    alone = text_of(post(base, seed=5, temperature=1.5))
    assert alone == texts[0]


def test_log_probabilities_fit_the_text(exact):
    scores = post(exact, logprobs=3, echo=True).json()["choices"][0]
    tokens = scores["logprobs"]["tokens"]
    assert "".join(tokens) == scores["text"]
    assert scores["logprobs"]["token_logprobs"][0] is None
    for chosen, top in zip(
        scores["logprobs"]["token_logprobs"][1:],
        scores["logprobs"]["top_logprobs"][1:],
        strict=True,
    ):
        assert max(top.values()) >= chosen
    read = post(exact, prompt=scores["text"], logprobs=3, echo=True, max_tokens=0)
    assert read.json()["choices"][0]["logprobs"]["tokens"] == tokens
    for a, b in zip(
        read.json()["choices"][0]["logprobs"]["token_logprobs"],
        scores["logprobs"]["token_logprobs"],
        strict=True,
    ):
        assert a == b or abs(a - b) < 1e-3


def chat(base, **body):
    messages = [{"role": "user", "content": "Name a colour."}]
    fields = {"messages": messages, "max_tokens": 40, **body}
    return post(base, "/v1/chat/completions", **fields)


def content(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def test_a_message_is_continued(base):
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    assert "Paris" in content(chat(base, messages=messages, continue_final_message=True))


def test_structures_are_kept(base):
    assert content(chat(base, guided_choice=["vermilion", "ochre"])) in ("vermilion", "ochre")
    assert content(chat(base, guided_regex="[a-c]{4}")).strip("abc") == ""
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["red", "blue"]}, "rgb": {"type": "boolean"}},
        "required": ["name", "rgb"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "colour", "schema": schema}}
    for fields in ({"response_format": form}, {"guided_json": schema},
                   {"structured_outputs": {"json": schema}}):  # fmt: skip
        value = json.loads(content(chat(base, **fields)))
        assert set(value) == {"name", "rgb"}
    free = content(chat(base, response_format={"type": "json_object"}, max_tokens=8))
    assert free.lstrip().startswith("{")  # so small a model need not come to the end of it


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {
            "type": "nonsense"}}}}, "response_format"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
    ],
)  # fmt: skip
def test_structures_that_make_no_sense_are_refused_by_name(base, fields, param):
    refused(chat(base, **fields), 400, param, "")


FIND = {
    "type": "function",
    "function": {
        "name": "find",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "find"}}])
def test_a_call_is_forced(base, choice):
    with openai.OpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0) as client:
        fields = {
            "model": MODEL, "messages": [{"role": "user", "content": "Find red."}],
            "tools": [FIND], "tool_choice": choice, "parallel_tool_calls": False,
            "temperature": 0, "max_tokens": 100,
        }  # fmt: skip
        (answer,) = client.chat.completions.create(**fields).choices
        (call,) = answer.message.tool_calls
        assert call.function.name == "find"
        assert set(json.loads(call.function.arguments)) == {"colour"}
        assert answer.finish_reason == "tool_calls"
        deltas = [
            delta
            for part in client.chat.completions.create(stream=True, **fields)
            for delta in part.choices[0].delta.tool_calls or []
        ]
    assert "".join(d.function.arguments for d in deltas) == call.function.arguments


def running(base):
    lines = httpx.get(f"{base}/metrics").text.splitlines()
    (value,) = [
        line.rpartition(" ")[2]
        for line in lines
        if line.startswith("cloverinfer_num_requests_running{")
    ]
    return float(value)


LEAVES = httpx.Timeout(30, read=1)
"""Of a client that does not wait for the end of an answer."""


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_forgotten_everywhere(base, stream):
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "n": 2}
    with contextlib.suppress(httpx.ReadTimeout), httpx.Client(timeout=LEAVES) as client:
        request = fields | {"stream": stream}
        with client.stream("POST", f"{base}/v1/completions", json=request) as answer:
            next(answer.iter_lines())
    deadline = time.monotonic() + 60
    while running(base) > 0 or attention_blocks(base) > 0:  # those of a step that was under way
        assert time.monotonic() < deadline
        time.sleep(0.05)
    before = steps(base, "dense")
    time.sleep(0.3)
    assert steps(base, "dense") == before


def attention_blocks(base):
    """Blocks in use; none where no step is under way."""
    (model,) = httpx.get(f"{base}/v1/cluster").json()["models"]
    return sum(n["kv_blocks_used"] for n in model["nodes"] if n["role"] == "attention")
