"""The dense half of Qwen2: a Llama whose q, k and v have biases and whose output has none."""

from __future__ import annotations

from .llama import LlamaHalf


class Qwen2Half(LlamaHalf):
    """Weights of a Qwen2; see ``LlamaHalf``."""

    has_out_bias = False
