"""The dense half of Qwen3: a Llama that normalises each query and key head before rotating it."""

from __future__ import annotations

from .llama import LlamaHalf


class Qwen3Half(LlamaHalf):
    """Weights of a Qwen3; see ``LlamaHalf``."""

    has_qk_norm = True
