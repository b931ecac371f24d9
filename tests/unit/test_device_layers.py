"""Layers on a device: rows that the backend rotates give what rows rotated by the half give."""

from __future__ import annotations

import torch
from tests.dense_twin import TwinKernels
from tests.device_kit import PaddedAttention

from cloverinfer.attention.base import FusedRows, RotatesOnAppend
from cloverinfer.kvcache.layout import PoolLayout
from cloverinfer.models.base import ModelArch
from cloverinfer.models.cuda_stages import CudaStages
from cloverinfer.models.llama import LlamaHalf
from cloverinfer.models.registry import create_half
from cloverinfer.models.weights import Checkpoint, DummySource
from cloverinfer.nodes.device_layers import StepTensors, run_layers

BLOCK = 4


class RotatingAttention(PaddedAttention, RotatesOnAppend):
    def __init__(self) -> None:
        super().__init__()
        self.rotated = 0

    def append_rotated(self, layer: int, rows: FusedRows, slots_t: torch.Tensor) -> torch.Tensor:
        self.rotated += 1
        q, k, v = rows.parts
        TwinKernels().rotate(
            rows.qkv_thd, (q, k, v), rows.positions_t, rows.rope, rows.norm_hd, rows.eps
        )
        self.append(layer, k, v, slots_t)
        return q


def make_half() -> LlamaHalf:
    arch = ModelArch("qwen3", 3, 48, 4, 2, 16, 80, 64, 128)
    half = create_half(arch, Checkpoint(DummySource(0), torch.float32), 128)
    assert isinstance(half, LlamaHalf)
    rope = half._cos, half._sin
    half._cuda = CudaStages(arch, half._weights, rope, TwinKernels())  # type: ignore[arg-type]
    return half


def test_layers_with_rotation_left_to_the_backend() -> None:
    half = make_half()
    results = []
    for whole in (False, True):
        backend = RotatingAttention()
        backend.allocate(PoolLayout(half.specs, BLOCK, 8), 4)
        for position in range(3):  # the second row only fills up
            step = StepTensors(
                torch.tensor([position + 5, 0, 9 - position]),
                torch.tensor([position, 0, position]),
                torch.tensor([position, -1, BLOCK * 3 + position]),
                (
                    torch.arange(4, dtype=torch.int32),
                    torch.tensor([[0], [7], [3]], dtype=torch.int32),
                    torch.tensor([position + 1, 0, position + 1], dtype=torch.int32),
                ),
            )
            attn_out, carry = run_layers(half, backend, step, whole)
        assert backend.rotated == (9 if whole else 0)
        results.append((attn_out[[0, 2]], carry[0][[0, 2]]))
    torch.testing.assert_close(results[0], results[1])
