"""Compiled halves on a GPU, as they are and through torch.compile, captured like any half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests import compiled_models, same_tokens
from tests.close_scores import errors_of_writing
from tests.tiny_models import make_tiny

from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.attention.cuda import missing
from cloverinfer.models import DenseHalf, load_half, resolve_model
from cloverinfer.models.base import QKV

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.timeout(300),
]
DEVICE = torch.device("cuda")
LOWERINGS = ["eager", "inductor"]
COLOCATED: dict[str, Any] = {"topology": "colocated", "executor": "local", "device": "cuda"}
TOKENS = 20
WIDE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 1024,
    "initializer_range": 0.06,
}
"""Sizes that the kernels of bfloat16 are made for."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOVER_CACHE", str(tmp_path / "cache"))


def half_of(folder: Path, impl: str, lowering: str = "eager") -> DenseHalf:
    config = ModelConfig(
        model_path=str(folder), dtype="bfloat16", model_impl=impl, lowering=lowering
    )
    return load_half(resolve_model(config), device=DEVICE)


def rows_for(half: DenseHalf, layer: int, tokens: int) -> QKV | None:
    """Where queries, keys and values are wanted: rows with room after each token's."""
    if layer == half.num_layers:
        return None
    spec, heads = half.specs[layer], half.arch.num_heads
    sizes = (heads, spec.k_dim), (spec.kv_heads, spec.k_dim), (spec.kv_heads, spec.v_dim)
    q, k, v = (torch.empty((tokens, h + 1, d), dtype=half.dtype, device=DEVICE) for h, d in sizes)
    return q[:, :-1], k[:, :-1], v[:, :-1]


@torch.inference_mode()
def values_of(half: DenseHalf, tokens: int, elsewhere: bool = False) -> list[torch.Tensor]:
    """Queries, keys and values of each layer, and logits, with the same attention outputs for every
    half; ``elsewhere``: in rows of the caller's."""
    generator = torch.Generator().manual_seed(tokens)
    ids, carry, out = torch.arange(tokens, device=DEVICE) % 90, None, None
    values: list[torch.Tensor] = []
    for i in range(half.num_layers + 1):
        rows = rows_for(half, i, tokens) if elsewhere else None
        *qkv, carry = half.stage(i, out, carry, ids if i == 0 else None, ids, rows)
        if i < half.num_layers:
            values += [one.clone() for one in qkv if one is not None]
            shape = (tokens, half.arch.num_heads, half.specs[i].v_dim)
            out = torch.randn(shape, generator=generator).to(DEVICE, half.dtype)
    assert carry is not None
    return [*values, half.logits(carry)]


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_compiled_and_native_halves_agree_in_bfloat16(lowering: str, tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "model")
    native, compiled = half_of(folder, "native"), half_of(folder, "compiled", lowering)
    for tokens in (1, 5, 100):
        found, there = values_of(compiled, tokens), values_of(compiled, tokens, elsewhere=True)
        for one, other, same in zip(values_of(native, tokens), found, there, strict=True):
            assert (one - other).abs().max() < 0.06 * one.abs().max(), tokens
            assert torch.equal(other, same), tokens


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_answers_in_bfloat16_are_as_near_float32_as_transformers(
    lowering: str, tmp_path: Path
) -> None:
    """Captured, appended where they are rotated, by the kernels of the native halves."""
    folder = make_tiny("llama", tmp_path / "model", **WIDE)
    half = half_of(folder, "compiled")
    assert half.unrotated() is not None
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(5, 1000, (n,), generator=generator).tolist() for n in (1, 33, 129)]
    fields = {"num_blocks": 200, "model_impl": "compiled", "lowering": lowering}
    errors_of_writing(str(folder), prompts, TOKENS, "cuda", **fields).check()


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
