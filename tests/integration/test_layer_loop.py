"""Layers without Python: the same bits as layer by layer, and who runs which way is told."""

import os
import signal

import pytest
import torch
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams, _native
from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.core.errors import CloverError
from cloverinfer.nodes import forward
from cloverinfer.nodes.answers import Answers
from cloverinfer.nodes.attention import AttentionNode

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], list(range(1, 60))]
POOL = {"num_blocks": 64, "executor": "local", "threads": 2}

pytestmark = pytest.mark.skipif(
    _native.dense_isas() == ["portable"], reason="no native stages without vectors"
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            path = make_tiny(family, tmp_path_factory.mktemp(family), num_hidden_layers=3)
            made[family] = ModelConfig(model_path=str(path), dtype="bfloat16")
        return made[family]

    return make


@pytest.fixture(scope="module")
def wanted(models):
    """Of the llama, layer by layer."""
    with LLM(models("llama"), topology="colocated", layer_loop="python", **POOL) as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def total(rows, role, what):
    return sum(row[what] for row in rows.values() if row["role"] == role)


def rows_of(llm):
    return {row["name"]: row for row in llm.engine.nodes()}


def run(model, monkeypatch, prompts=PROMPTS, **fields):
    """Tokens, the logits of every step of one row's request, and the nodes' rows."""
    seen = []
    whole = forward.sample

    def spy(logits, *args):
        seen.append(logits.clone())
        return whole(logits, *args)

    with LLM(model, **(POOL | fields)) as llm, monkeypatch.context() as patch:
        tokens = [done.token_ids for done in llm.generate(prompts, GREEDY)]
        patch.setattr(forward, "sample", spy)
        llm.generate([PROMPTS[0]], GREEDY)
        check_idle(llm)
        return tokens, seen, rows_of(llm)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
def test_the_same_bits_as_layer_by_layer(models, monkeypatch, family, topology):
    model = models(family)
    wanted, logits, rows = run(model, monkeypatch, topology=topology, layer_loop="python")
    assert not any(row["native_layers"] for row in rows.values())
    tokens, same, rows = run(model, monkeypatch, topology=topology)
    assert tokens == wanted
    assert len(same) == len(logits) == GREEDY.max_tokens
    assert all(torch.equal(a, b) for a, b in zip(same, logits, strict=True))
    steps = 2 * (GREEDY.max_tokens - 2)  # at least, of decode rows alone
    node = rows[{"colocated": "colocated-0", "pd": "decode-0", "pda": "dense-0"}[topology]]
    if topology != "pda":
        assert node["native_layers"] >= 3 * steps
    else:
        # A step whose plan came late to the attention node went layer by layer.
        assert node["native_layers"] > 20
        attention = rows["attention-0"]
        assert attention["native_layers"] == node["native_layers"]
        assert attention["steps"] == node["steps"]
        assert attention["bytes_out"] == node["bytes_in"] > 0
        assert attention["attention_seconds"] > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"executor": "process"},
        {"executor": "process", "num_attention_nodes": 2, "num_decode_dense_nodes": 2},
        {"num_attention_nodes": 2, "num_decode_dense_nodes": 2},
        {"transport": "shm"},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_the_same_tokens_over_every_wire_that_offers_a_way(models, wanted, fields):
    setting = POOL | {"topology": "pda"} | fields
    with LLM(models("llama"), **setting) as llm:
        tokens = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
        check_idle(llm)
        rows = rows_of(llm)
    assert tokens == wanted
    layers = {role: total(rows, role, "native_layers") for role in ("dense", "attention")}
    # A hop that a step's loop has not waited for any longer goes on layer by layer.
    assert min(layers.values()) > 20
    if "num_attention_nodes" not in fields:
        assert total(rows, "dense", "steps") == total(rows, "attention", "steps")
    assert total(rows, "dense", "bytes_in") == total(rows, "attention", "bytes_out") > 0


def test_neither_end_of_a_hop_over_shm_computes_in_python(models, wanted, monkeypatch):
    """Not even the last layer of a step; each end notes what the other says of it."""
    whole, calls = AttentionNode._attend, []

    def attend(self, key, step, layer):
        calls.append((step.plan.step, layer))
        whole(self, key, step, layer)

    monkeypatch.setattr(AttentionNode, "_attend", attend)
    with LLM(models("llama"), **(POOL | {"topology": "pda", "transport": "shm"})) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == wanted
        rows = rows_of(llm)
    assert rows["attention-0"]["attention_seconds"] > 0
    assert rows["attention-0"]["native_layers"] + len(calls) == 3 * rows["dense-0"]["steps"]
    # But of a first step, for which the way back may not be open yet.
    assert len({step for step, _ in calls}) <= 1


def test_steps_that_are_not_answered_natively_are_told_by_the_node(models, wanted, monkeypatch):
    """Every third one over shm: nothing is told twice, or not at all."""
    whole, begun = Answers.begin, []

    def begin(self, *args):
        begun.append(args)
        if len(begun) % 3:
            whole(self, *args)

    monkeypatch.setattr(Answers, "begin", begin)
    with LLM(models("llama"), **(POOL | {"topology": "pda", "transport": "shm"})) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == wanted
        check_idle(llm)
        rows = rows_of(llm)
    dense, attention = rows["dense-0"], rows["attention-0"]
    assert attention["steps"] == dense["steps"]
    assert attention["bytes_out"] == dense["bytes_in"] > 0
    assert 0 < attention["native_layers"] <= 3 * (len(begun) - len(begun) // 3)


def test_several_wavefronts_go_layer_by_layer_on_the_dense_node(models):
    setting = POOL | {"topology": "pda", "num_wavefronts": 2}
    with LLM(models("llama"), **setting) as llm:
        assert [len(done.token_ids) for done in llm.generate(PROMPTS, GREEDY)] == [20] * 4
        assert rows_of(llm)["dense-0"]["native_layers"] == 0


def test_a_layer_that_fails_fails_its_step_alone(models, monkeypatch):
    """Over shm, in Python."""
    whole, calls = CpuAttention.attend, []

    def attend(self, layer, *args):
        calls.append(layer)
        if len(calls) == 7:
            raise MemoryError("out of memory, says the test")
        return whole(self, layer, *args)

    setting = POOL | {"topology": "pda", "transport": "shm", "layer_loop": "python"}
    with LLM(models("llama"), **setting) as llm:
        llm.generate([PROMPTS[0]], GREEDY)
        monkeypatch.setattr(CpuAttention, "attend", attend)
        with pytest.raises(CloverError, match="out of memory, says the test"):
            llm.generate([PROMPTS[0]], GREEDY)
        monkeypatch.undo()
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == GREEDY.max_tokens
        check_idle(llm)


LONG = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)


def start(llm):
    stream = llm.engine.stream_sync([1, 2], LONG)
    for _ in range(5):
        next(stream)
    return stream, next(row["pid"] for row in llm.engine.nodes() if row["role"] == "attention")


def test_a_peer_that_is_killed_in_a_step_fails_it_and_hangs_nobody(models):
    with LLM(models("llama"), topology="pda", executor="process", num_blocks=64) as llm:
        stream, pid = start(llm)
        os.kill(pid, signal.SIGKILL)
        last = list(stream)[-1]
        assert last.finish_reason == "error"
        assert "attention-0" in last.error
        assert rows_of(llm)["dense-0"]["native_layers"] > 0


def test_a_peer_that_stands_still_fails_the_step_at_its_deadline(models):
    setting = {"topology": "pda", "executor": "process", "num_blocks": 64, "step_timeout": 2.0}
    with LLM(models("llama"), **setting) as llm:
        stream, pid = start(llm)
        os.kill(pid, signal.SIGSTOP)
        try:
            last = list(stream)[-1]
        finally:
            os.kill(pid, signal.SIGCONT)
        assert last.finish_reason == "error"
        assert "took more than 2 s" in last.error
        check_idle(llm)  # its answer, late as it is, ends the step, and the nodes go on
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == GREEDY.max_tokens


@pytest.mark.parametrize(
    ("family", "fields"), [("opt", {}), ("llama", {"attention_backend": "torch"})]
)
def test_what_has_no_table_runs_layer_by_layer(models, family, fields):
    with LLM(models(family), topology="colocated", **POOL, **fields) as llm:
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == GREEDY.max_tokens
        assert rows_of(llm)["colocated-0"]["native_layers"] == 0


def test_other_types_than_bfloat16_run_layer_by_layer_to_the_same_tokens(models):
    model = ModelConfig(model_path=models("llama").model_path, dtype="float32")
    told = []
    for fields in (
        {"topology": "colocated", "executor": "local"},
        {"topology": "pda", "executor": "process"},
    ):
        with LLM(model, **{**POOL, **fields}) as llm:
            told.append([out.token_ids for out in llm.generate(PROMPTS, GREEDY)])
            assert all(row["native_layers"] == 0 for row in rows_of(llm).values())
    assert told[0] == told[1]
