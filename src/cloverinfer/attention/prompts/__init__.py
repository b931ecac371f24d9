"""Who attends over prompts on a GPU, by the names of ``cluster.prompt_attention``.

A way's module is imported when it is asked for.
"""

from __future__ import annotations

import importlib

from ...core.errors import ConfigError
from .base import PromptAttention

_CLASSES = {
    "auto": ("sdpa", "SdpaPrompts"),
    "own": None,
    "flash-attn": ("flash_attn", "FlashAttnPrompts"),
    "flashinfer": ("flashinfer", "FlashInferPrompts"),
}


def prompt_attention_names() -> list[str]:
    return list(_CLASSES)


def find_prompt_attention(name: str) -> type[PromptAttention] | None:
    """The class called ``name``, still without a pool; None: our kernels attend over all rows.
    ``ConfigError`` where it is unknown, or its library is not there."""
    if name not in _CLASSES:
        raise ConfigError(f"unknown prompt attention {name!r}; known: {', '.join(_CLASSES)}")
    place = _CLASSES[name]
    if place is None:
        return None
    module, of = place
    found: type[PromptAttention] = getattr(importlib.import_module(f".{module}", __package__), of)
    reason = found.missing()
    if reason:
        raise ConfigError(
            f"cluster.prompt_attention {name}: {reason}; or leave it out, and our kernels are used"
        )
    return found
