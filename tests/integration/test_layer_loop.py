"""Layers without Python: the same bits as layer by layer, and who runs which way is told."""

import pytest
import torch
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams, _native
from cloverinfer.models import llama

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


def rows_of(llm):
    return {row["name"]: row for row in llm.engine.nodes()}


def run(model, monkeypatch, prompts=PROMPTS, **fields):
    """Tokens, the logits of every step of one row's request, and the nodes' rows."""
    seen = []
    whole = llama.LlamaHalf.logits

    def spy(self, carry):
        result = whole(self, carry)
        seen.append(result.clone())
        return result

    with LLM(model, **(POOL | fields)) as llm, monkeypatch.context() as patch:
        tokens = [done.token_ids for done in llm.generate(prompts, GREEDY)]
        patch.setattr(llama.LlamaHalf, "logits", spy)
        llm.generate([PROMPTS[0]], GREEDY)
        check_idle(llm)
        return tokens, seen, rows_of(llm)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("topology", ["colocated", "pd"])
def test_the_same_bits_as_layer_by_layer(models, monkeypatch, family, topology):
    model = models(family)
    wanted, logits, rows = run(model, monkeypatch, topology=topology, layer_loop="python")
    assert not any(row["native_layers"] for row in rows.values())
    tokens, same, rows = run(model, monkeypatch, topology=topology)
    assert tokens == wanted
    assert len(same) == len(logits) == GREEDY.max_tokens
    assert all(torch.equal(a, b) for a, b in zip(same, logits, strict=True))
    node = rows["colocated-0" if topology == "colocated" else "decode-0"]
    # Each decode step has three layers; a step with a long prompt's chunk goes layer by layer.
    assert node["native_layers"] >= 3 * 2 * (GREEDY.max_tokens - 2)


@pytest.mark.parametrize(
    ("family", "fields"), [("opt", {}), ("llama", {"attention_backend": "torch"})]
)
def test_what_has_no_table_runs_layer_by_layer(models, family, fields):
    with LLM(models(family), topology="colocated", **POOL, **fields) as llm:
        assert len(llm.generate([PROMPTS[0]], GREEDY)[0].token_ids) == GREEDY.max_tokens
        assert rows_of(llm)["colocated-0"]["native_layers"] == 0
