"""The engine with its node on a GPU: `make test-gpu`.

Tokens against transformers on the same GPU, draws against the CPU's, and what is said where memory
is short.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.test_smollm2 import TEXTS
from tests.same_tokens import Case, check, reference, reference_of, run
from tests.tiny_models import add_tokenizer, make_tiny
from transformers import AutoModelForCausalLM

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import missing
from cloverinfer.core.errors import CloverError, ConfigError, NodeStartError
from cloverinfer.models import load_tokenizer, resolve_model, sample
from cloverinfer.models.hub import known_gguf
from cloverinfer.models.weights import DummySource
from cloverinfer.nodes.memory import graph_reserve
from cloverinfer.wire.messages import Sampling

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
DEVICE = "cuda"
SMOLLM2 = "smollm2-135m"
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "opt"]
MAX_TOKENS = 20
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 300, 9, 12]
COLOCATED: dict[str, Any] = {"topology": "colocated", "executor": "local", "device": DEVICE}
Tiny = Callable[[str], tuple[str, list[Case]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """Folder and reference cases of a family, made once; the reference is on the GPU too."""
    made: dict[str, tuple[str, list[Case]]] = {}

    def make(family: str) -> tuple[str, list[Case]]:
        if family not in made:
            folder = add_tokenizer(make_tiny(family, tmp_path_factory.mktemp(family)))
            peer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            generator = torch.Generator().manual_seed(1)
            prompts = [torch.randint(1, 90, (n,), generator=generator).tolist() for n in LENGTHS]
            made[family] = str(folder), reference(peer.eval().to(DEVICE), prompts, MAX_TOKENS)
        return made[family]

    return make


@contextlib.contextmanager
def engine(path: str, dtype: str = "float32", **fields: Any) -> Iterator[LLM]:
    with LLM(ModelConfig(model_path=path, dtype=dtype), **(COLOCATED | fields)) as llm:
        yield llm


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "budget"), [(32, 1024), (7, 32), (1, 64)])
def test_greedy_tokens_are_those_of_transformers(
    tiny: Tiny, family: str, rows: int, budget: int
) -> None:
    model, cases = tiny(family)
    limits = {"max_num_seqs": rows, "max_num_batched_tokens": budget, "num_blocks": 300}
    check(cases, run(model, cases, MAX_TOKENS, **limits, **COLOCATED))


def test_a_pool_too_small_for_all_changes_no_token(tiny: Tiny) -> None:
    model, cases = tiny("llama")
    cases = [case for case in cases if len(case.prompt) < 100]
    few = {"block_size": 16, "num_blocks": 9, "strict": False}
    check(cases, run(model, cases, MAX_TOKENS, **few, **COLOCATED))


def test_a_compiled_model_gives_the_same_tokens(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path))
    folder, cases = tiny("llama")
    model = ModelConfig(model_path=folder, dtype="float32", model_impl="compiled")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(model, **COLOCATED) as llm:
        completions = llm.generate([case.prompt for case in cases], params)
    check(cases, [completion.token_ids for completion in completions])


def test_a_node_in_a_process_of_its_own_uses_the_gpu(tiny: Tiny) -> None:
    model, cases = tiny("qwen3")
    fields = COLOCATED | {"executor": "process"}
    check(cases[:4], run(model, cases[:4], MAX_TOKENS, **fields))


@pytest.mark.parametrize("topology", ["colocated", "pd", "pda"])
def test_without_a_flag_the_gpu_is_used_in_bfloat16(tiny: Tiny, topology: str) -> None:
    with LLM(tiny("llama")[0], topology=topology, executor="local") as llm:
        rows = llm.engine.nodes()
        assert {row["device"].partition(":")[0] for row in rows} == {"cuda"}
        assert {info.peer.dtype for info in llm.engine._engine.cluster.infos} == {"bfloat16"}
        assert len(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].token_ids) > 0


PARAMS = [
    {"temperature": 0.8},
    {"temperature": 1.3, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 2.0, "min_p": 0.05, "top_p": 0.95},
    {"temperature": 0.7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": {7: 3.0}, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 2},
    {"temperature": 0.0, "presence_penalty": 0.7, "logprobs": 0},
    {
        "temperature": 0.0,
        "repetition_penalty": 1.4,
        "min_tokens": 4,
        "stop_token_ids": list(range(9)),
    },
]


def test_seeded_answers_are_the_cpus(tiny: Tiny) -> None:
    """Draws, penalties, biases and log-probabilities, in one batch."""
    model, cases = tiny("llama")
    prompts = [case.prompt for case in cases[: len(PARAMS)]]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, seed=17 + i, **fields)
        for i, fields in enumerate(PARAMS)
    ]
    answers = []
    for device in (DEVICE, "cpu"):
        with engine(model, device=device, num_blocks=100) as llm:
            answers.append(llm.generate(prompts, params))
    for mine, cpu in zip(*answers, strict=True):
        assert mine.token_ids == cpu.token_ids
        for scores in ("logprobs", "prompt_logprobs"):
            for one, other in zip(
                getattr(mine, scores) or [], getattr(cpu, scores) or [], strict=True
            ):
                assert (one is None) == (other is None)
                if one is not None:
                    assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
                    assert one.top_ids == other.top_ids


def test_draws_from_the_same_logits_are_the_same() -> None:
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(3)) * 4
    params = [
        Sampling(0.0 if i % 5 == 0 else 0.5 + i / 40, i % 7, 1.0 if i % 3 else 0.8, i, min_p=0.01)
        for i in range(64)
    ]
    positions = list(range(100, 164))
    assert sample(logits.to(DEVICE), params, positions) == sample(logits, params, positions)


def test_an_fp8_cache_is_close_to_the_models_own_type(tiny: Tiny) -> None:
    model, cases = tiny("llama")
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    scores = []
    for stored in ("auto", "fp8"):
        with engine(model, "bfloat16", kv_cache_dtype=stored, num_blocks=100) as llm:
            assert (
                llm.engine._engine.cluster.infos[0].peer.layout.specs[0].dtype
                == {
                    "auto": "bfloat16",
                    "fp8": "float8_e4m3",
                }[stored]
            )
            answer = llm.generate([cases[8].prompt], params)[0]
            scores.append([one.logprob for one in answer.prompt_logprobs[1:]])
    own, fp8 = torch.tensor(scores)
    assert 0 < (own - fp8).abs().mean() < 0.3 * own.std()


def test_dummy_weights_are_those_of_the_cpu() -> None:
    there = DummySource(3, torch.device(DEVICE)).load("x.weight", (3000, 77))
    assert torch.equal(there.cpu(), DummySource(3).load("x.weight", (3000, 77)))


@pytest.mark.skipif(not known_gguf(SMOLLM2).exists(), reason=f"{SMOLLM2} has not been fetched")
def test_twenty_prompts_of_smollm2() -> None:
    model = resolve_model(ModelConfig(model_path=SMOLLM2, dtype="float32"))
    tokenizer = load_tokenizer(model)
    long = tokenizer.encode(" ".join(TEXTS[2:10]) * 2)
    prompts = [tokenizer.encode(text) for text in TEXTS]
    prompts += [long[:1], long[:63], long[:64], long[:65]]
    outputs = run(SMOLLM2, [Case(prompt, [], []) for prompt in prompts], 64, **COLOCATED)
    peer = AutoModelForCausalLM.from_pretrained(model.path, dtype="float32").eval().to(DEVICE)
    check(reference_of(peer, prompts, outputs), outputs)


# -- memory


def test_a_closed_engine_leaves_its_memory_to_the_next(tiny: Tiny) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    for _ in range(3):
        blocks = int(0.4 * total) // (256 * 512)
        with engine(tiny("llama")[0], block_size=256, num_blocks=blocks) as llm:
            pool = llm.engine._engine.cluster.infos[0].peer.layout.total_bytes
            assert pool > 0.35 * total
            assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids


def test_a_pool_takes_its_part_of_the_gpu(tiny: Tiny) -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    with engine(
        tiny("llama")[0], gpu_memory_utilization=0.1, max_num_seqs=8, max_model_len=512
    ) as llm:
        layout = llm.engine._engine.cluster.infos[0].peer.layout
        assert layout.num_blocks == 2 * 8 * 512 // 32  # never more than can be used
    part = graph_reserve(total) + (64 << 20)
    limits = {"max_num_seqs": 512, "max_num_batched_tokens": 128}
    with engine(tiny("llama")[0], gpu_memory_utilization=part / total, **limits) as llm:
        layout = llm.engine._engine.cluster.infos[0].peer.layout
        assert 1 << 20 < layout.total_bytes < 64 << 20
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].token_ids


@pytest.mark.parametrize("executor", ["local", "process"])
def test_no_room_is_said_with_the_numbers(tiny: Tiny, executor: str) -> None:
    with (
        pytest.raises(
            (ConfigError, NodeStartError), match=r"no room for a KV pool: .*weights take"
        ),
        engine(tiny("llama")[0], executor=executor, gpu_memory_utilization=1e-6),
    ):
        pass
    with (
        pytest.raises((ConfigError, NodeStartError), match="too little memory for a KV pool of"),
        engine(tiny("llama")[0], executor=executor, num_blocks=10**9),
    ):
        pass


def test_a_step_out_of_memory_fails_and_the_node_lives(tiny: Tiny) -> None:
    with engine(tiny("llama")[0], num_blocks=50) as llm:
        node = llm.engine._engine.cluster._executor._nodes["colocated-0"]
        real = node.rows.batch

        def too_large(plan: Any) -> Any:
            node.rows.batch = real
            return torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)

        node.rows.batch = too_large
        params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
        with pytest.raises(CloverError, match="too little memory for a step"):
            llm.generate([[1, 2, 3]], params)
        assert len(llm.generate([[1, 2, 3]], params)[0].token_ids) == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype int8: on GPUs"),
        ({"kv_cache_dtype": "fp8"}, "fp8 needs model.dtype bfloat16 or float16"),
        ({"device": "cuda:99"}, "cluster.device cuda:99: the host of colocated-0 has"),
        ({"attention_backend": "cpu"}, "no node of topology colocated"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused(tiny: Tiny, fields: dict[str, Any], reason: str) -> None:
    with (
        pytest.raises((ConfigError, NodeStartError), match=reason),
        engine(tiny("llama")[0], **fields),
    ):
        pass
