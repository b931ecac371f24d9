"""How large a model's weights are, from its shape: for those who do not load them."""

from __future__ import annotations

import torch

from .arch import COMPILED
from .base import ModelArch
from .resolve import ResolvedModel
from .weights import SAFETENSORS


def estimated_weights(model: ResolvedModel) -> int:
    """Bytes of the weights in the model's type, to a few hundredths."""
    if model.arch.family == COMPILED:
        return (model.path / SAFETENSORS).stat().st_size
    size = torch.empty((), dtype=getattr(torch, model.dtype)).itemsize
    ends, layers = _numbers(model.arch)
    return ends * size + layers * (1 if model.quantization else size)


def _numbers(arch: ModelArch) -> tuple[int, int]:
    """Of the ends, and of the layers' matrices."""
    hidden, heads = arch.hidden_size, arch.num_heads + arch.num_kv_heads
    attention = 2 * hidden * heads * arch.head_dim
    opt = arch.family == "opt"
    layer = attention + (2 if opt else 3) * hidden * arch.intermediate_size
    ends = (1 if arch.tie_embeddings else 2) * arch.vocab_size
    return (ends + opt * arch.max_position) * hidden, arch.num_layers * layer
