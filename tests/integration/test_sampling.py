"""What requests ask of sampling beyond temperature, over real nodes: the same in every topology."""

import pytest
import torch
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams

TOPOLOGIES = ["colocated", "pd", "pda"]
PROMPTS = [[5, 6, 7], [9], list(range(1, 40)), [3, 3, 3, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(make_tiny("llama", tmp_path_factory.mktemp("m")))


@pytest.fixture(scope="module")
def peer(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=TOPOLOGIES)
def llm(request, folder):
    model = ModelConfig(model_path=folder, dtype="float32")
    with LLM(model, topology=request.param, num_blocks=64, block_size=16, max_num_seqs=8) as made:
        yield made
        check_idle(made)


@pytest.fixture
def tight(folder):
    """Makes engines whose pools are far too small for all requests: decode preempts."""

    def make(topology):
        model = ModelConfig(model_path=folder, dtype="float32")
        return LLM(model, topology=topology, num_blocks=7, block_size=16, max_num_seqs=8)

    return make


def asked(**fields):
    return SamplingParams(**({"max_tokens": 12, "temperature": 0.0, "ignore_eos": True} | fields))


def scores(peer, tokens):
    """Log-probabilities of the token after each one, by the reference."""
    with torch.no_grad():
        return torch.log_softmax(peer(torch.tensor([tokens])).logits[0].float(), -1)


def check_logprobs(peer, prompt, completion, count):
    """Each token's record against the reference's distribution in its place."""
    tokens = completion.token_ids
    wanted = scores(peer, prompt + tokens)[len(prompt) - 1 :]
    assert len(completion.logprobs) == len(tokens)
    for token, record, row in zip(tokens, completion.logprobs, wanted, strict=False):
        assert record.token_id == token
        assert record.logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert record.rank == int((row > row[token] + 1e-4).sum()) + 1
        assert len(record.top_ids) == len(record.top_logprobs) == count
        best = row.topk(count).values.tolist() if count else []
        assert record.top_logprobs == pytest.approx(best, abs=2e-4)
        assert [float(row[t]) for t in record.top_ids] == pytest.approx(best, abs=2e-4)


def test_logprobs_are_the_models_own(llm, peer):
    """Some ask and some do not, greedy and drawn, in one batch, the first token included."""
    params = [
        asked(logprobs=5),
        asked(),
        asked(logprobs=0),
        asked(logprobs=20, temperature=3.0, top_k=30, seed=4),
    ]
    plain, *_ = llm.generate([PROMPTS[1]], asked())
    done = llm.generate(PROMPTS, params)
    assert done[1].logprobs is None
    assert done[1].token_ids == plain.token_ids
    for i, count in ((0, 5), (2, 0), (3, 20)):
        check_logprobs(peer, PROMPTS[i], done[i], count)
    assert max(record.rank for record in done[3].logprobs) > 1
    assert all(record.rank == 1 for record in done[0].logprobs)


def test_logprobs_stream_with_their_tokens(llm):
    chunks = list(llm.engine.stream_sync([5, 6, 7], asked(logprobs=2)))
    assert all([r.token_id for r in chunk.logprobs] == chunk.token_ids for chunk in chunks)
    assert sum(len(chunk.logprobs) for chunk in chunks) == 12


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_changes_no_logprobs(tight, topology, peer):
    with tight(topology) as llm:
        done = llm.generate(PROMPTS * 2, asked(logprobs=3, max_tokens=40))
        assert sum(one.metrics["preemptions"] for one in done) > 0
        for prompt, one in zip(PROMPTS * 2, done, strict=True):
            check_logprobs(peer, prompt, one, 3)
        check_idle(llm)
