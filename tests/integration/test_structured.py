"""Structured output over real nodes: what comes is what was asked for, the same in every topology.

The model is random, so every constraint that is kept is kept by the masks alone.
"""

import functools
import json
import queue
import re
import threading
import time

import llguidance
import pytest
from tests.same_tokens import check_idle
from tests.tiny_models import add_tokenizer, make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import RequestError

TOPOLOGIES = ["colocated", "pd", "pda"]
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "name": {"type": "string", "maxLength": 5},
    },
    "required": ["kind", "age", "name"],
    "additionalProperties": False,
}
SUMS = 'start: term ("+" term)~2\nterm: /[0-9]{1,2}/ | "(" term ")"'
ARROWS = 'root ::= "<" [a-c]+ ">" | "-" root'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(add_tokenizer(make_tiny("llama", tmp_path_factory.mktemp("m"))))


def make(folder, topology, **fields):
    model = ModelConfig(model_path=folder, dtype="float32")
    return LLM(model, topology=topology, **({"num_blocks": 128, "block_size": 16} | fields))


@pytest.fixture(params=TOPOLOGIES)
def llm(request, folder):
    with make(folder, request.param) as made:
        yield made
        check_idle(made)


def asked(**fields):
    return SamplingParams(**({"max_tokens": 300, "temperature": 1.0, "seed": 1} | fields))


def shaped(seed=1, **outputs):
    return asked(structured_outputs=outputs, seed=seed, ignore_eos=True)


CASES = [
    shaped(json=SCHEMA),
    asked(temperature=0.0, max_tokens=40, ignore_eos=True),
    shaped(regex=r"\d{3}-[a-f]{20}(x|yz)?"),
    shaped(choice=["left", "right", "left and right"]),
    shaped(grammar=SUMS),
    shaped(grammar=ARROWS, seed=3),
    shaped(json=json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 4})),
    asked(temperature=0.0, max_tokens=60, structured_outputs={"regex": "[a-z]{50}"}),
]
PROMPTS = ["a", "bb " * 9, "c", "d", "e", "f", "a longer one " * 4, "h"]
FORMS = {
    2: r"[0-9]{3}-[a-f]{20}(x|yz)?",
    3: r"left( and right)?|right",
    4: r"\(*\d{1,2}\)*\+\(*\d{1,2}\)*\+\(*\d{1,2}\)*",
    5: r"-*<[a-c]+>",
    7: r"[a-z]{50}",
}


@pytest.fixture(scope="module")
def wanted(folder):
    """Tokens of each case alone, from one node."""
    with make(folder, "colocated") as llm:
        done = [llm.generate(p, c)[0] for p, c in zip(PROMPTS, CASES, strict=True)]
    return [one.token_ids for one in done]


def check_forms(done):
    answer = json.loads(done[0].text)
    assert set(answer) == {"kind", "age", "name"}
    assert answer["kind"] in ("cat", "dog")
    assert 0 <= answer["age"] <= 99
    assert all(isinstance(one, bool) for one in json.loads(done[6].text))
    for i, form in FORMS.items():
        assert re.fullmatch(form, done[i].text), done[i].text
    for i, one in enumerate(done):
        assert one.finish_reason == ("length" if i == 1 else "stop")
        assert one.stop_reason is None


def test_every_kind_is_kept_in_a_batch_with_others(llm, wanted):
    done = llm.generate(PROMPTS, CASES)
    assert [one.token_ids for one in done] == wanted
    check_forms(done)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_loses_no_place_in_a_grammar(folder, topology, wanted):
    with make(folder, topology, num_blocks=8) as llm:
        done = llm.generate(PROMPTS * 2, CASES * 2)
        assert sum(one.metrics["preemptions"] for one in done) > 0
        assert [one.token_ids for one in done] == wanted * 2
        check_idle(llm)


def test_processes_of_their_own_compile_for_themselves(folder, wanted):
    with make(folder, "pda", executor="process", num_decode_dense_nodes=2) as llm:
        done = llm.generate(PROMPTS, CASES)
        assert [one.token_ids for one in done] == wanted
        check_idle(llm)


@pytest.mark.parametrize(
    ("outputs", "part"),
    [
        ({"json": {"type": "nope"}}, "json cannot be compiled: .*nope"),
        ({"regex": "(("}, "regex cannot be compiled: .*unclosed group"),
        ({"regex": "(?=x)"}, "look-ahead"),
        ({"grammar": "start: foo"}, 'unknown name: "foo"'),
        ({"choice": ["a", ""]}, "choice must be a list of 1 to"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "json must be a JSON schema"),
        ({"json_object": "yes"}, "json_object must be true"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of"),
        ({}, "exactly one of"),
        ({"regexp": "a"}, "no field 'regexp'"),
        ("json", "must be an object"),
        ({"regex": "a" * 2_000_000}, "more than"),
        ({"regex": "[a&&b]"}, "it allows no text"),
        ({"grammar": "start: start"}, "it allows no text"),
        ({"json": {"$ref": "#"}}, "it allows no text"),
        ({"regex": "a{1000000}"}, "too many expressions constructed$"),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(refuser, outputs, part):
    with pytest.raises(RequestError, match=part) as caught:
        refuser.generate("a", shaped(**outputs) if outputs != "json" else shape_of("json"))
    assert caught.value.param == "structured_outputs"


def shape_of(value):
    return SamplingParams(structured_outputs=value)


@pytest.fixture(scope="module")
def refuser(folder):
    with make(folder, "colocated") as made:
        yield made
        check_idle(made)


def test_a_grammar_outranks_what_forbids_its_only_way_on(refuser):
    params = asked(
        structured_outputs={"choice": ["abc"]}, bad_words=("b",), min_tokens=9, logit_bias={66: -99}
    )
    (done,) = refuser.generate("x", params)
    assert (done.text, done.finish_reason) == ("abc", "stop")


def test_one_whose_grammar_gives_up_fails_alone(refuser, monkeypatch):
    """And is told that its own parameter is to blame, after what it had already."""
    limits = functools.partial(llguidance.LLParserLimits, max_items_in_row=30)
    monkeypatch.setattr(llguidance, "LLParserLimits", limits)
    heard = {"shaped": [], "plain": []}
    over = threading.Semaphore(0)

    def sink(name):
        def take(item):
            heard[name].append(item)
            if isinstance(item, Exception) or item.finish_reason is not None:
                over.release()

        return take

    grammar = 'start: s\ns: s s | s s s | "a" | "b"'
    ambiguous = asked(structured_outputs={"grammar": grammar}, min_tokens=200)
    refuser.engine.submit("a", ambiguous, sink("shaped"))
    refuser.engine.submit("b", CASES[1], sink("plain"))
    assert all(over.acquire(timeout=20) for _ in range(2))
    *before, error = heard["shaped"]
    assert isinstance(error, RequestError)
    assert error.param == "structured_outputs"
    count = sum(len(chunk.token_ids) for chunk in before)
    assert count > 1
    assert f"structured_outputs: cannot go on after {count} tokens: " in str(error)
    assert heard["plain"][-1].finish_reason == "length"


def test_one_whose_parameters_forbid_every_token_fails_alone(refuser):
    tokenizer = refuser.tokenizer
    (last,) = tokenizer.encode("a", add_special_tokens=False)
    others = tuple(token for token in range(tokenizer.vocab_size + 100) if token != last)
    params = asked(stop_token_ids=others, min_tokens=9, bad_words=("a",))
    arrived = queue.SimpleQueue()
    for _ in range(3):
        refuser.engine.submit("b", CASES[1], arrived.put)
    refuser.engine.submit("b", params, arrived.put)
    chunks = [arrived.get(timeout=20)]
    while sum(chunk.finish_reason is not None for chunk in chunks) < 4:
        chunks.append(arrived.get(timeout=20))
    assert sorted(c.finish_reason for c in chunks if c.finish_reason) == ["error"] + ["length"] * 3
    (error,) = (chunk.error for chunk in chunks if chunk.error)
    assert "no token can be chosen" in error


def test_a_slow_compile_stalls_nobody_else(refuser, monkeypatch):
    from cloverinfer.models import grammar

    whole, go = grammar._compile, threading.Event()

    def slow(one, tokenizer):
        assert go.wait(30)
        return whole(one, tokenizer)

    monkeypatch.setattr(grammar, "_compile", slow)
    done = []
    thread = threading.Thread(
        target=lambda: done.extend(refuser.generate("a", shaped(regex="[pq]{7}")))
    )
    thread.start()
    try:
        (plain,) = refuser.generate("b", CASES[1])
        assert len(plain.token_ids) == 40
        assert done == []
    finally:
        go.set()
        thread.join(30)
    assert re.fullmatch("[pq]{7}", done[0].text)


def test_a_model_without_a_tokenizer_says_so(tmp_path):
    model = ModelConfig(model_path=str(make_tiny("llama", tmp_path)), dtype="float32")
    with LLM(model, topology="colocated", num_blocks=16) as llm:
        with pytest.raises(RequestError, match="needs a tokenizer"):
            llm.generate([[1]], shaped(regex="a"))


def test_bad_words_do_not_come(llm):
    plain = llm.generate("tell", asked(max_tokens=60, ignore_eos=True))[0].text
    pairs = [plain[i : i + 2] for i in range(5, 50, 9)]
    done = llm.generate("tell", asked(max_tokens=60, ignore_eos=True, bad_words=pairs))[0].text
    assert not [pair for pair in pairs if pair.strip() == pair and pair in done]
    assert done != plain


def test_stop_strings_special_tokens_and_what_is_shown_of_them(llm):
    greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
    plain = llm.generate("hello", asked(**greedy))[0].text
    stop = plain[4:6]
    cut = plain[: plain.index(stop)]
    for kept, text in ((False, cut), (True, cut + stop)):
        params = asked(**greedy, stop=stop, include_stop_str_in_output=kept)
        (done,) = llm.generate("hello", params)
        assert (done.text, done.finish_reason, done.stop_reason) == (text, "stop", stop)
    ends = asked(max_tokens=3, logit_bias={0: 100}, min_tokens=1)
    (done,) = llm.generate("hello", ends)
    assert len(done.token_ids) == 2
    for shown in (True, False):
        params = asked(
            max_tokens=3, logit_bias={0: 100}, include_stop_str_in_output=True,
            skip_special_tokens=not shown,
        )  # fmt: skip
        (done,) = llm.generate("hello", params)
        assert done.text == ("</s>" if shown else "")


def test_the_command_line_takes_a_form_and_shows_logprobs(folder, capsys):
    from cloverinfer import cli

    flags = [
        "--model",
        folder,
        "--dtype",
        "float32",
        "--topology",
        "colocated",
        "--num-blocks",
        "9",
    ]
    command = ["generate", "a", *flags, "--quiet", "--json", "--regex", "[ab]{4}"]
    assert cli.main([*command, "--logprobs", "2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert re.fullmatch("[ab]{4}", answer["text"])
    assert [record["token_id"] for record in answer["logprobs"]] == answer["token_ids"]
    assert all(len(record["top_ids"]) == 2 for record in answer["logprobs"])


def test_an_abort_reaches_a_request_whose_grammar_is_compiled(refuser, monkeypatch):
    from cloverinfer.nodes.grammars import GrammarWorker

    monkeypatch.setattr(GrammarWorker, "compile", lambda self, message: None)
    stream = refuser.engine.stream_sync("a", shaped(regex="[rs]{7}"))
    got = []
    thread = threading.Thread(target=lambda: got.extend(stream))
    thread.start()
    deadline = time.monotonic() + 20
    while not refuser.engine._engine._desk._pending:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (pending,) = refuser.engine._engine._desk._pending.values()
    refuser.engine.abort(pending.lives[0].group)
    thread.join(20)
    assert [chunk.finish_reason for chunk in got] == ["abort"]
