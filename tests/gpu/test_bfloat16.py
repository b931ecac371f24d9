"""bfloat16 on a GPU: `make test-gpu`.

Log-probabilities along the same tokens are as near float32's as transformers' own bfloat16 is, for
prompts and for decode steps, captured ones among them. Under ``batch_invariant`` every topology,
executor, budget and company gives the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.close_scores import errors_of_reading, errors_of_writing
from tests.same_tokens import check_idle
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import missing

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
DEVICE = "cuda"
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "initializer_range": 0.06,
}
"""Sizes that the kernels of bfloat16 are made for; make_tiny's own go to the plain ones."""
OPT: dict[str, Any] = {
    "hidden_size": 512,
    "word_embed_proj_dim": 512,
    "ffn_dim": 1024,
    "num_attention_heads": 8,
    "vocab_size": 1024,
    "init_std": 0.06,
}
LENGTHS = [1, 15, 33, 64, 129, 300]
TOKENS = 40


def make(family: str, folder: Path) -> str:
    fields = OPT if family == "opt" else dict(WIDE)
    if family == "qwen2":
        del fields["head_dim"]
    return str(make_tiny(family, folder, **fields))


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 1000, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("budget", [1024, 48])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "opt"])
def test_prompts_are_as_near_float32_as_transformers(
    family: str, budget: int, tmp_path: Path
) -> None:
    """In one go, and in chunks."""
    folder, fields = make(family, tmp_path), {"num_blocks": 200, "max_num_batched_tokens": budget}
    errors_of_reading(folder, prompts_of(LENGTHS[1:]), DEVICE, **fields).check()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "opt"])
def test_answers_are_as_near_float32_as_transformers(family: str, tmp_path: Path) -> None:
    prompts = prompts_of(LENGTHS)
    errors_of_writing(make(family, tmp_path), prompts, TOKENS, DEVICE, num_blocks=200).check()


SETTINGS: dict[str, dict[str, Any]] = {
    "colocated": {"topology": "colocated"},
    "colocated, by chunks": {"topology": "colocated", "max_num_batched_tokens": 48},
    "colocated, few rows": {"topology": "colocated", "max_num_seqs": 3},
    "colocated, in a process": {"topology": "colocated", "executor": "process"},
    "pd": {"topology": "pd"},
    "pd, in processes": {"topology": "pd", "executor": "process", "max_num_batched_tokens": 80},
    "pda": {"topology": "pda", "attention_backend": "cuda"},
    "pda, two lanes": {
        "topology": "pda",
        "attention_backend": "cuda",
        "num_wavefronts": 2,
        "num_attention_nodes": 2,
    },
    "pda, in processes": {"topology": "pda", "executor": "process", "attention_backend": "cuda"},
}
Said = list[tuple[list[int], list[float]]]


def say(folder: str, prompts: list[list[int]], device: str, dtype: str, **fields: Any) -> Said:
    """Tokens and their log-probabilities, some rows drawn by seed; at last of the first prompt
    alone."""
    common = {"executor": "local", "num_blocks": 160, "block_size": 16, "batch_invariant": True}
    model = ModelConfig(model_path=folder, dtype=dtype)
    params = [
        SamplingParams(
            max_tokens=10 + 7 * (i % 4),
            temperature=0.9 * (i % 2),
            seed=i,
            ignore_eos=True,
            logprobs=None if i % 3 == 1 else 0,
        )
        for i in range(len(prompts))
    ]
    with LLM(model, device=device, **(common | fields)) as llm:
        done = llm.generate(prompts, params)
        alone = llm.generate(prompts[:1], params[:1])[0]
        check_idle(llm)
    each = [*done, alone]
    return [(one.token_ids, [score.logprob for score in one.logprobs or []]) for one in each]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_topology_gives_the_same_bits(family: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("only on 9.0 are products the same in any company")
    folder, prompts = make(family, tmp_path), prompts_of([1, 200, 17, 33, 90, 64, 5, 130, 16])
    said = {
        name: say(folder, prompts, DEVICE, "bfloat16", **fields)
        for name, fields in SETTINGS.items()
    }
    wanted = said["colocated"]
    assert wanted[-1] == wanted[0]
    for name, got in said.items():
        for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
            assert mine == theirs, f"{name}: row {i}"
