"""The dense half of Mistral: a Llama; the KV specs carry its sliding window."""

from __future__ import annotations

from .llama import LlamaHalf


class MistralHalf(LlamaHalf):
    """Weights of a Mistral; see ``LlamaHalf``."""
