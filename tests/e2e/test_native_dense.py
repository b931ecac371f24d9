"""The default model in bfloat16: how far the native stages' logits are from float32."""

import torch
from tests.unit.test_models_halves import Runner

from cloverinfer import ModelConfig
from cloverinfer.models import llama, load_half, load_tokenizer, resolve_model

MODEL = "smollm2-135m"
TEXT = "The three laws of thermodynamics are as follows. First, the energy of an isolated system"


def test_teacher_forced_logits_are_as_near_float32_as_pytorchs(monkeypatch):
    """Token by token, as in decode; at most 1.5 times the error of PyTorch's bfloat16."""
    logits = {}
    for name, dtype, native in (
        ("float32", "float32", False),
        ("native", "bfloat16", True),
        ("torch", "bfloat16", False),
    ):
        monkeypatch.setattr(llama, "native_serves", lambda *_, native=native: native)
        model = resolve_model(ModelConfig(model_path=MODEL, dtype=dtype))
        runner = Runner(load_half(model))
        ids = load_tokenizer(model).encode(TEXT)
        logits[name] = torch.cat([runner.forward([token]) for token in ids])
    error, theirs = ((logits[name] - logits["float32"]).abs() for name in ("native", "torch"))
    print(
        f"largest error {error.max():.3f} (torch {theirs.max():.3f}), "
        f"mean {error.mean():.4f} (torch {theirs.mean():.4f})"
    )
    assert error.max() <= 1.5 * theirs.max()
    assert error.mean() <= 1.1 * theirs.mean()
    best, second = logits["float32"].topk(2).values.unbind(-1)
    differ = logits["native"].argmax(-1) != logits["float32"].argmax(-1)
    assert (best - second)[differ].lt(2 * error.max()).all(), "only near ties may fall otherwise"
