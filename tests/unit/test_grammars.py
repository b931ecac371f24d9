"""Requests wait for their grammar as long as they must and no longer; states follow tokens."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny_models import add_tokenizer, make_tiny

from cloverinfer.config import ModelConfig
from cloverinfer.core.errors import CloverError, RequestError
from cloverinfer.core.request import Request
from cloverinfer.core.sampling import SamplingParams
from cloverinfer.models import resolve_model
from cloverinfer.models.grammar import GrammarState, grammars_of
from cloverinfer.models.shaping import Shaper
from cloverinfer.orchestrator.grammars import GrammarDesk
from cloverinfer.orchestrator.live import Live
from cloverinfer.orchestrator.text import TextStream
from cloverinfer.wire.messages import CompileGrammar, Grammar, GrammarCompiled, Shaping

VOCAB = 96


def live(number: int, regex: str | None = None) -> Live:
    outputs: Any = None if regex is None else {"regex": regex}
    request = Request(number, "r", [1], SamplingParams(structured_outputs=outputs), 0.0)
    return Live(request, lambda item: None, TextStream(None, ()), f"group-{number}")


@pytest.fixture
def sent() -> list[tuple[str, CompileGrammar]]:
    return []


@pytest.fixture
def desk(sent: list[tuple[str, CompileGrammar]]) -> GrammarDesk:
    return GrammarDesk(["a", "b"], 5.0, lambda node, message, now: sent.append((node, message)))


def test_a_request_waits_for_every_node_and_the_next_for_none(desk, sent):
    first, second, third = live(1, "x"), live(2, "x"), live(3, "x")
    assert not desk.hold(live(0), 0.0)
    assert desk.hold(first, 0.0)
    assert desk.hold(second, 0.0)
    assert [(node, m.grammar) for node, m in sent] == [
        ("a", Grammar("regex", "x")),
        ("b", Grammar("regex", "x")),
    ]
    key = sent[0][1].key
    assert desk.answered(GrammarCompiled("a", key)) == ([], None)
    assert desk.answered(GrammarCompiled("a", key)) == ([], None)
    assert desk.answered(GrammarCompiled("b", key)) == ([first, second], None)
    assert desk.answered(GrammarCompiled("b", key)) == ([], None)
    assert not desk.hold(third, 0.0)


def test_refusals_deaths_deadlines_and_withdrawals_let_go(desk, sent):
    refused, orphan, late, gone = live(1, "w"), live(2, "x"), live(3, "y"), live(4, "y")
    assert desk.hold(refused, 0.0)
    lives, problem = desk.answered(GrammarCompiled("b", sent[-1][1].key, "too large"))
    assert lives == [refused]
    assert isinstance(problem, RequestError)
    assert problem.param == "structured_outputs"
    assert desk.hold(orphan, 0.0)
    assert desk.answered(GrammarCompiled("b", sent[-1][1].key)) == ([], None)
    assert desk.lost("a") == ([orphan], None)
    assert desk.hold(late, 1.0)
    assert desk.hold(gone, 2.0)
    assert desk.holds("group-4")
    assert desk.withdraw("group-4") == [gone]
    assert not desk.holds("group-4")
    assert desk.expired(5.9)[0] == []
    lives, problem = desk.expired(6.0)
    assert lives == [late]
    assert isinstance(problem, CloverError)
    assert desk.hold(live(5, "z"), 7.0)
    assert [one.request.number for one in desk.withdraw()] == [5]
    assert {node for node, _ in sent[-1:]} == {"b"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder: Path = add_tokenizer(make_tiny("llama", tmp_path_factory.mktemp("m")))
    return resolve_model(ModelConfig(model_path=str(folder), dtype="float32"))


def test_states_are_the_same_wherever_they_are_made(model):
    """One that reads token by token, one made anew at each, and one that is taken back."""
    grammars, rng = grammars_of(model), random.Random(2)
    assert grammars_of(model) is grammars
    grammar = Grammar("regex", r"([a-f]{2,3}-){5}\d\d?")
    shaping = Shaping(num_prompt=3, grammar=grammar)
    tokens = [7, 8, 9]
    lasting = Shaper(shaping, [], 0, grammars.state(grammar))
    back = Shaper(shaping, [], 0, grammars.state(grammar))
    for _ in range(25):
        start = rng.randint(0, len(tokens) - 1)
        late = Shaper(shaping, tokens[:start], start, grammars.state(grammar))
        back.catch_up([*tokens, 67], len(tokens) + 1)
        masks = []
        for shaper, known in ((lasting, tokens), (late, tokens[start:]), (back, tokens)):
            shaper.catch_up(known, len(tokens))
            assert shaper.error == ""
            masks.append(shaper.allowed(VOCAB, []))
        assert np.array_equal(masks[0], masks[1])
        assert np.array_equal(masks[0], masks[2])
        allowed = np.flatnonzero(masks[0])
        if 0 in allowed:
            break
        tokens.append(int(rng.choice(allowed)))
    assert len(tokens) > 15


def test_a_token_that_the_grammar_forbids_is_an_error(model):
    grammars = grammars_of(model)
    state = grammars.state(Grammar("choice", '["ab"]'))
    assert np.flatnonzero(state.allowed(VOCAB)).tolist() == [66]
    state.read([70])
    assert state.error
    with pytest.raises(RequestError, match="regex cannot be compiled"):
        GrammarState(grammars.compile(Grammar("regex", "(")))


def test_one_that_takes_long_again_and_again_cannot_go_on(model, monkeypatch):
    state = grammars_of(model).state(Grammar("regex", "a*"))
    monkeypatch.setattr("cloverinfer.models.grammar.SLOW_SECONDS", 0.5)
    monkeypatch.setattr("cloverinfer.models.grammar.time.thread_time", itertools.count().__next__)
    for slow in (7, 0, 7):  # a fast one in between forgives
        for _ in range(slow):
            state.allowed(VOCAB)
        assert state.error == ""
        monkeypatch.setattr("cloverinfer.models.grammar.SLOW_SECONDS", 2.0)
        state.allowed(VOCAB)
        monkeypatch.setattr("cloverinfer.models.grammar.SLOW_SECONDS", 0.5)
    for _ in range(8):
        assert state.error == ""
        state.allowed(VOCAB)
    assert "took over 500 ms 8 times in a row" in state.error
    assert state.error.startswith("structured_outputs: cannot go on after 0 tokens")
    state.reset()
    assert state.error == ""


def test_only_so_many_compiled_grammars_are_kept(model, monkeypatch):
    monkeypatch.setattr("cloverinfer.models.grammar.MAX_COMPILED", 3)
    grammars = grammars_of(model)
    kept = grammars.compile(Grammar("regex", "kept"))
    for i in range(5):
        grammars.compile(Grammar("regex", f"x{i}"))
        assert grammars.compile(Grammar("regex", "kept")) is kept
    assert len(grammars._compiled) == 3
