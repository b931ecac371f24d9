"""The GPU's stages, with the kernels' twin on the CPU, against PyTorch's way."""

from __future__ import annotations

import pytest
import torch
from tests.dense_twin import TwinKernels

from cloverinfer.models.base import ModelArch
from cloverinfer.models.cuda_stages import CudaStages
from cloverinfer.models.linear import Linear
from cloverinfer.models.llama import LlamaHalf
from cloverinfer.models.registry import create_half
from cloverinfer.models.weights import Checkpoint, DummySource

TOKENS = 5


class FusingLinear(Linear):
    """Takes additions and gates along."""

    def fuses_add(self, rows: int) -> bool:
        return rows == TOKENS

    def fuses_gate(self, rows: int) -> bool:
        return rows == TOKENS


def make_half(family: str) -> LlamaHalf:
    arch = ModelArch(
        family=family,
        num_layers=3,
        hidden_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=80,
        vocab_size=64,
        max_position=128,
        attention_bias=family == "qwen2",
    )
    half = create_half(arch, Checkpoint(DummySource(0), torch.float32), 128)
    assert isinstance(half, LlamaHalf)
    torch.manual_seed(0)
    weights = half._weights
    norms = [weights.final_norm, *(x.qk_norm_hd for x in weights.layers if half.has_qk_norm)]
    for norm in [*norms, *(n for x in weights.layers for n in (x.input_norm, x.post_norm))]:
        norm.copy_(torch.rand(norm.shape) + 0.5)
    return half


def make_stages(half: LlamaHalf, fusing: bool) -> CudaStages:
    if fusing:
        for layer in half._weights.layers:
            for name in ("qkv", "out", "gate_up", "down"):
                linear = getattr(layer, name)
                setattr(layer, name, FusingLinear(linear.weight, linear.bias))
    return CudaStages(half.arch, half._weights, (half._cos, half._sin), TwinKernels())  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("fusing", [False, True])
def test_stages_are_those_of_pytorch(family: str, fusing: bool) -> None:
    half = make_half(family)
    stages = make_stages(half, fusing)
    ids, positions = torch.randint(64, (TOKENS,)), torch.randint(128, (TOKENS,))
    carry = expected_carry = attended = None
    for i in range(half.num_layers + 1):
        out = None
        if i % 2:  # rows of somebody else's
            parts = torch.empty((TOKENS, 9, 16)).split_with_sizes((4, 2, 3), 1)
            out = parts[0], parts[1], parts[2][:, :2]
        *qkv, carry = stages.stage(i, attended, carry, ids, positions, out)
        *expected, expected_carry = half.stage(i, attended, expected_carry, ids, positions)
        if i == half.num_layers:
            break
        for mine, other in zip(qkv, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert out is None or all(
            x.data_ptr() == y.data_ptr() for x, y in zip(out, qkv, strict=True)
        )
        attended = torch.randn(TOKENS, 4, 16)
    assert carry is not None
    assert expected_carry is not None
    rows = torch.tensor([3, 1])
    logits = stages.logits(tuple(part[rows] for part in carry))
    torch.testing.assert_close(
        logits, half.logits((expected_carry[0][rows],)), rtol=1e-4, atol=1e-5
    )
