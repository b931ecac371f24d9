"""Compiled halves on a GPU, as they are and through torch.compile, captured like any half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import compiled_models, same_tokens
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import missing
from cloverinfer.models import DenseHalf, load_half, resolve_model

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cuda")
LOWERINGS = ["eager", "inductor"]
COLOCATED: dict[str, Any] = {"topology": "colocated", "executor": "local", "device": "cuda"}
TOKENS = 20


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))


def half_of(folder: Path, impl: str, lowering: str = "eager") -> DenseHalf:
    config = ModelConfig(
        model_path=str(folder), dtype="bfloat16", model_impl=impl, lowering=lowering
    )
    return load_half(resolve_model(config), device=DEVICE)


@torch.inference_mode()
def logits_of(half: DenseHalf, tokens: int) -> torch.Tensor:
    """With the same attention outputs for every half."""
    generator = torch.Generator().manual_seed(tokens)
    ids, carry, out = torch.arange(tokens, device=DEVICE) % 90, None, None
    for i in range(half.num_layers + 1):
        q, _, v, carry = half.stage(i, out, carry, ids if i == 0 else None, ids)
        if q is not None and v is not None:
            shape = (tokens, q.shape[1], v.shape[2])
            out = torch.randn(shape, generator=generator).to(DEVICE, half.dtype)
    assert carry is not None
    return half.logits(carry)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_compiled_and_native_halves_agree_in_bfloat16(lowering: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    native, compiled = half_of(folder, "native"), half_of(folder, "compiled", lowering)
    for tokens in (1, 5, 100):
        one, other = logits_of(native, tokens), logits_of(compiled, tokens)
        assert (one - other).abs().max() < 0.06 * one.abs().max(), tokens


@pytest.mark.parametrize(
    ("name", "lowering"),
    [("olmoe", "eager"), ("qwen2_moe", "eager"), ("gpt_neox", "inductor"), ("gemma2", "inductor")],
)
def test_captured_steps_give_the_tokens_of_transformers(
    name: str, lowering: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    model = compiled_models.make_model(name, folder)
    prompts = [list(range(3, 40)), [5, 6, 7], [9]]
    cases = same_tokens.reference(model, prompts, TOKENS)
    config = ModelConfig(model_path=str(folder), dtype="float32", lowering=lowering)
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(config, **COLOCATED) as llm:
        outputs = [one.token_ids for one in llm.generate(prompts, params)]
    same_tokens.check(cases, outputs)
