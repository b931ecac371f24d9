"""Dense halves by family; a family's module is imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ..core.errors import ModelError
from .base import DenseHalf, ModelArch

if TYPE_CHECKING:
    from .weights import Checkpoint

_CLASSES = {
    "llama": "LlamaHalf",
    "mistral": "MistralHalf",
    "qwen2": "Qwen2Half",
    "qwen3": "Qwen3Half",
    "opt": "OPTHalf",
}


def create_half(arch: ModelArch, checkpoint: Checkpoint, max_len: int) -> DenseHalf:
    """``arch``'s dense half with ``checkpoint``'s weights, for ``max_len`` positions."""
    name = _CLASSES.get(arch.family)
    if name is None:
        raise ModelError(f"unknown model family {arch.family!r}; known: {', '.join(_CLASSES)}")
    module = importlib.import_module(f".{arch.family}", __package__)
    half: DenseHalf = getattr(module, name)(arch, checkpoint, max_len)
    return half
