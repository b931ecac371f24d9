"""Two-layer random models of every family: the same tokens in every topology and setting."""

import itertools

import pytest
import torch
from tests.same_tokens import check, check_idle, pairwise, reference, run, settings_id
from tests.tiny_models import make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams

pytestmark = pytest.mark.timeout(900)
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "opt"]
MAX_TOKENS = 20
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 5, 9, 12]
"""Around the edges of blocks of 16 and 32."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Folder and reference cases of a family, made once."""
    made = {}

    def make(family):
        if family not in made:
            folder = make_tiny(family, tmp_path_factory.mktemp(family))
            peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            generator = torch.Generator().manual_seed(1)
            prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
            made[family] = str(folder), reference(peer, prompts, MAX_TOKENS)
        return made[family]

    return make


def fields(setting):
    chunked = setting["chunked"]
    return {
        "topology": setting["topology"],
        "block_size": setting["block_size"],
        "max_num_seqs": setting["max_num_seqs"],
        "num_wavefronts": setting["num_wavefronts"],
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": 32 if chunked else 1024,
        "num_blocks": 200,
        "transport": setting.get("transport", "auto"),
        **{name: count for name, count in setting.items() if name.startswith("num_")},
    }


LOCAL = {
    "topology": ["colocated", "pd", "pda"],
    "block_size": [16, 32],
    "max_num_seqs": [1, 7, 32],
    "num_wavefronts": [1, 2],
    "chunked": [True, False],
}


def check_settings(tiny, family, settings):
    model, cases = tiny(family)
    for setting in settings:
        outputs = run(model, cases, MAX_TOKENS, executor="local", **fields(setting))
        try:
            check(cases, outputs)
        except AssertionError as problem:
            raise AssertionError(f"{setting}: {problem}") from problem


def test_full_cross_product_in_one_process(tiny):
    products = itertools.product(*LOCAL.values())
    check_settings(tiny, "llama", [dict(zip(LOCAL, one, strict=True)) for one in products])


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "llama"])
def test_pairwise_in_one_process(tiny, family):
    """A family is a dense half, which settings reach by the shapes of its batches alone."""
    check_settings(tiny, family, pairwise(LOCAL, most=12))


MANY = LOCAL | {
    "topology": ["pd", "pda"],
    "family": FAMILIES,
    "num_prefill_workers": [1, 2],
    "num_decode_dense_nodes": [1, 2],
}
COUNTS = itertools.cycle([1, 2, 3])
PROCESSES = [
    ("process", setting | ({"num_attention_nodes": next(COUNTS)} if pda else {}))
    for setting in pairwise(MANY | {"transport": ["shm", "tcp"]}, most=6)
    for pda in [setting["topology"] == "pda"]
]
ACTORS = [
    ("ray", setting)
    for setting in pairwise(MANY | {"transport": ["shm", "tcp", "ray"]}, most=3, seed=5)
]


def test_the_selections_meet_each_value():
    assert {setting["family"] for _, setting in PROCESSES} == set(FAMILIES)
    assert {setting.get("num_attention_nodes", 1) for _, setting in PROCESSES} == {1, 2, 3}
    for selection, transports in ((PROCESSES, {"shm", "tcp"}), (ACTORS, {"shm", "tcp", "ray"})):
        assert {setting["transport"] for _, setting in selection} == transports
        assert {setting["topology"] for _, setting in selection} == {"pd", "pda"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "setting"),
    PROCESSES + ACTORS,
    ids=lambda v: v if isinstance(v, str) else settings_id(v),
)
def test_pairwise_in_processes_and_actors(tiny, executor, setting):
    model, cases = tiny(setting["family"])
    outputs = run(model, cases, MAX_TOKENS, executor=executor, **fields(setting))
    check(cases, outputs)


def test_preemption_and_several_nodes_change_no_token(tiny):
    """Pools far too small for all requests at once: decode runs out of blocks and recomputes."""
    model, cases = tiny("llama")
    counts = {
        "colocated": {},
        "pd": {"num_prefill_workers": 2, "num_decode_dense_nodes": 2},
        "pda": {
            "num_prefill_workers": 2,
            "num_decode_dense_nodes": 2,
            "num_attention_nodes": 2,
        },
    }
    for topology, nodes in counts.items():
        outputs = run(
            model,
            cases,
            MAX_TOKENS,
            topology=topology,
            executor="local",
            block_size=16,
            num_blocks=9,
            strict=False,
            **nodes,
        )
        check(cases, outputs)


def mixed_params(count):
    """Greedy, sampled, stopped by a token, and those whose next step needs the host."""
    kinds = [
        {},
        {"temperature": 0.9, "top_k": 20, "seed": 3},
        {"stop_token_ids": tuple(range(0, 90, 7))},
        {"logprobs": 2},
        {"presence_penalty": 1.0},
    ]
    return [
        SamplingParams(**{"max_tokens": 8 + i, "temperature": 0.0, **kinds[i % len(kinds)]})
        for i in range(count)
    ]


@pytest.mark.parametrize("topology", ["colocated", "pd"])
def test_steps_launched_ahead_change_no_token(tiny, topology):
    """Blocks are short, so that some are preempted; stops are found late, and counted."""
    model, cases = tiny("llama")
    prompts = [case.prompt for case in cases]
    said = {}
    for ahead in (False, True):
        with LLM(
            ModelConfig(model_path=model, dtype="float32"),
            topology=topology,
            executor="local",
            block_size=16,
            num_blocks=14,
            max_num_batched_tokens=32,
            async_scheduling=ahead,
        ) as llm:
            done = llm.generate(prompts, mixed_params(len(prompts)))
            check_idle(llm)
            stats = llm.engine.stats()
        said[ahead] = [(one.token_ids, one.finish_reason) for one in done]
        assert stats.preemptions > 0
        assert (stats.dropped_rows > 0) == ahead
    assert said[True] == said[False]
