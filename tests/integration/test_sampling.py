"""What requests ask of sampling beyond temperature, over real nodes: the same in every topology."""

import time

import pytest
import torch
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.core.errors import QueueFullError, RequestError

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


SHAPES = [
    {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"repetition_penalty": 1.7},
    {"logit_bias": {11: 30.0, 12: 29.0}, "frequency_penalty": 1.0},
    {"min_tokens": 8, "stop_token_ids": tuple(range(0, 96, 2))},
    {"repetition_penalty": 0.9, "presence_penalty": -1.0, "logprobs": 4},
    {},
]


def plainly(peer, prompt, params):
    """Greedy tokens by the letter of the parameters, from the reference's logits."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + params.max_tokens:
        with torch.no_grad():
            logits = peer(torch.tensor([tokens])).logits[0, -1].float()
        said = tokens[len(prompt) :]
        for token, by in (params.logit_bias or {}).items():
            logits[token] += by
        if len(said) < params.min_tokens:
            logits[list(params.stop_token_ids)] = -torch.inf
        for token in set(tokens):
            p = params.repetition_penalty
            logits[token] = logits[token] / p if logits[token] > 0 else logits[token] * p
        for token in set(said):
            logits[token] -= params.frequency_penalty * said.count(token) + params.presence_penalty
        tokens.append(int(logits.argmax()))
        if tokens[-1] in params.stop_token_ids:
            break
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def shaped(peer):
    """Prompts, parameters and what must come of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine, waiting for a second one takes longest
    cases = []
    for i, fields in enumerate(SHAPES):
        params = asked(max_tokens=30, **fields)
        prompt = PROMPTS[i % len(PROMPTS)]
        cases.append((prompt, params, plainly(peer, prompt, params)))
    plain = [plainly(peer, prompt, asked()) for prompt, *_ in cases]
    torch.set_num_threads(threads)
    assert sum(few != case[2][:12] for few, case in zip(plain, cases, strict=True)) == 5
    return cases


def test_shaped_logits_give_the_same_tokens_in_every_topology(llm, shaped, peer):
    prompts, params, wanted = zip(*shaped, strict=True)
    done = llm.generate(list(prompts), list(params))
    assert [one.token_ids for one in done] == list(wanted)
    check_logprobs(peer, prompts[4], done[4], 4)  # the model's own, whatever shapes the logits
    # A cached prefix is not read again, but its tokens count.
    again = llm.generate(list(prompts), list(params))
    assert again[2].metrics["cached_tokens"] > 0
    assert [one.token_ids for one in again] == list(wanted)
    assert len(wanted[3]) == 9 or wanted[3][8] % 2
    assert done[3].stop_reason == wanted[3][-1]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_keeps_counts(tight, topology, shaped):
    prompts, params, wanted = zip(*shaped, strict=True)
    with tight(topology) as llm:
        done = llm.generate(list(prompts) * 2, list(params) * 2)
        assert sum(one.metrics["preemptions"] for one in done) > 0
        assert [one.token_ids for one in done] == list(wanted) * 2
        check_idle(llm)


def test_a_bias_outside_the_vocabulary_is_refused(llm):
    with pytest.raises(RequestError, match="logit_bias: token id 96 is not in") as caught:
        llm.generate([[1]], asked(logit_bias={96: 1.0}))
    assert caught.value.param == "logit_bias"


def test_several_sequences_read_their_prompt_once(llm):
    prompt = list(range(1, 40))
    params = asked(n=3, temperature=2.0, seed=9)
    (done,) = llm.generate([prompt], params)
    each = [done, *done.alternatives]
    alone = [
        llm.generate([prompt], asked(temperature=2.0, seed=9 + i))[0].token_ids for i in range(3)
    ]
    assert [one.token_ids for one in each] == alone
    assert len({tuple(tokens) for tokens in alone}) == 3
    assert [one.metrics["cached_tokens"] >= 32 for one in each] == [False, True, True]


def test_sequences_stream_by_index_and_end_together_when_cancelled(llm):
    chunks = list(llm.engine.stream_sync([5, 6], asked(n=4, temperature=1.0)))
    for index in range(4):
        mine = [chunk for chunk in chunks if chunk.index == index]
        assert sum(len(chunk.token_ids) for chunk in mine) == 12
        assert [chunk.finish_reason for chunk in mine[:-1]] == [None] * (len(mine) - 1)
        assert mine[-1].finish_reason == "length"
    for seen in (1, 5):
        stream = llm.engine.stream_sync([5, 6], asked(n=4, max_tokens=400))
        for _ in range(seen):
            next(stream)
        stream.close()
    check_idle(llm)


def test_many_sequences_pass_through_a_short_queue(folder):
    model = ModelConfig(model_path=folder, dtype="float32")
    with LLM(model, topology="colocated", num_blocks=64, max_queue=4) as llm:
        done = llm.generate([[1, 2], [3], [4, 5]], asked(n=4, temperature=1.0))
        assert [len(one.alternatives) for one in done] == [3, 3, 3]
        with pytest.raises(QueueFullError):
            llm.generate([[1, 2]], asked(n=100, temperature=1.0))
        check_idle(llm)
        aborted = sum(llm.engine.stats().counters.aborted.values())
        with pytest.raises(QueueFullError):
            list(llm.engine.stream_sync([1, 2], asked(n=100, temperature=1.0, max_tokens=400)))
        check_idle(llm)
        # Those that the queue took end with those that it refused, and are counted then.
        deadline = time.monotonic() + 60
        while sum(llm.engine.stats().counters.aborted.values()) == aborted:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_salt_and_a_priority_change_no_tokens(llm):
    plain = llm.generate(PROMPTS, asked())
    salted = llm.generate(PROMPTS, asked(), priority=[3, 0, -2, 0], cache_salt="mine")
    assert [one.token_ids for one in salted] == [one.token_ids for one in plain]
    assert salted[2].metrics["cached_tokens"] == 0
    again = llm.generate(PROMPTS, asked(), cache_salt="mine")
    assert again[2].metrics["cached_tokens"] > 0
    for wrong in ({"priority": "high"}, {"cache_salt": ""}, {"cache_salt": 3}):
        with pytest.raises(RequestError) as caught:
            llm.engine.submit([1], asked(), print, **wrong)
        assert caught.value.param == next(iter(wrong))


def check_prompt_logprobs(peer, prompt, records, count):
    assert len(records) == len(prompt)
    assert records[0] is None
    wanted = scores(peer, prompt)
    for token, record, row in zip(prompt[1:], records[1:], wanted, strict=False):
        assert record.token_id == token
        assert record.logprob == pytest.approx(float(row[token]), abs=2e-4)
        best = row.topk(count).values.tolist() if count else []
        assert record.top_logprobs == pytest.approx(best, abs=2e-4)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_prompts_are_scored_in_full_whatever_is_cached(folder, peer, topology, monkeypatch):
    """In chunks of one block beside other requests; the first time nothing is cached, then all."""
    monkeypatch.setattr("cloverinfer.nodes.forward.SCORE_TOKENS", 7)
    model = ModelConfig(model_path=folder, dtype="float32")
    limits = {"num_blocks": 64, "block_size": 16, "max_num_batched_tokens": 24}
    with LLM(model, topology=topology, **limits) as llm:
        plain = llm.generate(PROMPTS, asked())
        params = [
            asked(prompt_logprobs=3),
            asked(prompt_logprobs=0, max_tokens=0),
            asked(prompt_logprobs=5, logprobs=1, n=2),
            asked(),
        ]
        for _ in range(2):
            done = llm.generate(PROMPTS, params)
            for i, count in ((0, 3), (1, 0), (2, 5)):
                check_prompt_logprobs(peer, PROMPTS[i], done[i].prompt_logprobs, count)
            assert done[3].prompt_logprobs is None
            assert done[2].metrics["cached_tokens"] == 0
            assert done[2].alternatives[0].prompt_logprobs is None
            assert done[2].alternatives[0].metrics["cached_tokens"] == 32
            for i in (0, 2, 3):
                assert done[i].token_ids == plain[i].token_ids
        check_idle(llm)


def test_no_tokens_may_be_asked_for(llm, peer):
    longest = [7] * llm.engine.max_model_len
    done = llm.generate([[1, 2, 3], longest], asked(max_tokens=0, prompt_logprobs=2, logprobs=1))
    for one in done:
        assert (one.token_ids, one.text, one.finish_reason) == ([], "", "length")
        assert one.logprobs == []
        assert one.metrics["ttft"] is None
    check_prompt_logprobs(peer, [1, 2, 3], done[0].prompt_logprobs, 2)
    assert len(done[1].prompt_logprobs) == len(longest)
    (none,) = llm.generate([[1]], asked(max_tokens=0, n=2))
    assert [one.token_ids for one in (none, *none.alternatives)] == [[], []]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_prompt_logprobs_survive_preemption(tight, topology, peer):
    with tight(topology) as llm:
        params = asked(max_tokens=40, prompt_logprobs=2)
        done = llm.generate(PROMPTS * 2, params)
        assert sum(one.metrics["preemptions"] for one in done) > 0
        for prompt, one in zip(PROMPTS * 2, done, strict=True):
            check_prompt_logprobs(peer, prompt, one.prompt_logprobs, 2)
        check_idle(llm)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_preemption_changes_no_logprobs(tight, topology, peer):
    with tight(topology) as llm:
        done = llm.generate(PROMPTS * 2, asked(logprobs=3, max_tokens=40))
        assert sum(one.metrics["preemptions"] for one in done) > 0
        for prompt, one in zip(PROMPTS * 2, done, strict=True):
            check_logprobs(peer, prompt, one, 3)
        check_idle(llm)
