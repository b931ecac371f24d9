"""The contract of a dense half: all the weights of a model and none of its KV cache.

A model of L layers has stages 0 to L. Stage 0 embeds and computes the first layer's q, k, v;
stage i finishes layer i - 1 (output projection, FFN) and computes layer i's q, k, v; stage L
finishes the last layer. ``logits`` is the final norm and the LM head.

Shapes: t tokens, h query heads, n KV heads, d key size, e value size, c vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _native
from ..attention.base import FusedRows
from ..kvcache.layout import KVSpec

Carry = tuple[torch.Tensor, ...]
"""Opaque to all but the half; every tensor has the tokens as its first dimension, so a caller
may select rows between stages."""


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def place(qkv: QKV, out: QKV | None) -> QKV:
    """``qkv``, copied to where it is wanted."""
    if out is None:
        return qkv
    for target, value in zip(out, qkv, strict=True):
        target.copy_(value)
    return out


@dataclass(frozen=True)
class ModelArch:
    """A model's shape, whatever file it came from. Names follow Hugging Face's ``config.json``."""

    family: str
    """Registry key of the dense half: llama, mistral, qwen2, qwen3, opt."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """Longest context in tokens."""
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    tie_embeddings: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    """Layers with the window; None: all, where there is a window."""
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """What only one family reads (for OPT: word_embed_proj_dim, do_layer_norm_before, ...)."""


class NativeStep(ABC):
    """One step of a dense half's table: what its stages read, and the carry between them."""

    address: int
    """What the table's functions take as the step."""

    @abstractmethod
    def carry(self, layers: int) -> Carry:
        """The carry that stage ``layers - 1`` left, for ``DenseHalf.stage``."""

    @abstractmethod
    def logits(self, attended_the: torch.Tensor) -> torch.Tensor:
        """The last stage, then ``DenseHalf.logits`` of all tokens, once the table's stages have
        run; ``attended_the``, contiguous, is the last layer's. The next step overwrites them."""


class NativeDense(ABC):
    """A dense half's stages as a table of C functions, but for the last, which a step runs with its
    logits."""

    table: _native.DenseTable

    @abstractmethod
    def begin(self, token_ids_t: torch.Tensor, positions_t: torch.Tensor) -> NativeStep:
        """A step of these tokens; both int64 and contiguous. It may be run again once other tokens
        and positions stand in them."""


class UnrotatedStages(ABC):
    """A dense half's stages for an attention backend that rotates what it appends."""

    @abstractmethod
    def stage_unrotated(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
    ) -> tuple[FusedRows, Carry]:
        """Stage ``i`` below L, as ``DenseHalf.stage`` but for the rotation."""


class DenseHalf(ABC):
    """Holds no state between calls but its weights; the same call gives the same result."""

    arch: ModelArch
    specs: tuple[KVSpec, ...]
    """One per layer."""
    dtype: torch.dtype
    device: torch.device

    @property
    def num_layers(self) -> int:
        return len(self.specs)

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads (of the embedding only its rows)."""

    @abstractmethod
    def stage(
        self,
        i: int,
        attn_out_the: torch.Tensor | None,
        carry: Carry | None,
        token_ids_t: torch.Tensor | None,
        positions_t: torch.Tensor,
        out: QKV | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, Carry]:
        """Runs stage ``i``: returns q ``[t, h, d]``, k ``[t, n, d]``, v ``[t, n, e]`` (rotary
        positions applied, in the KV spec's type) and the carry; q, k, v are None at stage L.

        ``token_ids_t`` int64 is read at stage 0 only, ``attn_out_the`` ``[t, h, e]`` and ``carry``
        at stages 1 to L. ``positions_t`` int64 always. ``out``: where to write q, k and v, which
        are then what is returned; contiguous within a token, any stride between tokens.
        """

    @abstractmethod
    def logits(self, carry: Carry) -> torch.Tensor:
        """``[t, c]`` float32 from the carry of stage L."""

    def raw_logits(self, carry: Carry) -> torch.Tensor:
        """``logits`` in whatever float type they are computed in, for who reads any."""
        return self.logits(carry)

    def native(self) -> NativeDense | None:
        """The stages for a layer loop without Python; they give the same bits as ``stage``. None
        where the half has none."""
        return None

    def unrotated(self) -> UnrotatedStages | None:
        """The stages for a ``RotatesOnAppend`` backend on ``device``. None where there are none."""
        return None
