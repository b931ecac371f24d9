"""The one operator that stands for attention in a captured graph, opaque to every pass.

``cloverinfer::attention(q, k, v, sinks, layer, spec)``: causal attention of a whole prompt over
itself. Running it is for checking a graph; nodes never do, they cut there.

Shapes: t tokens, h query heads, n KV heads, d the key size, e the value size.
"""

from __future__ import annotations

import msgspec
import torch

from ..attention.rows import attend_plain
from ..kvcache.layout import KVSpec

UNNUMBERED = -1
"""Layer of a call before the whole graph is known."""


class CallSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one call of attention does besides the shapes of its tensors, as ``KVSpec`` says it."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    def kv_spec(self, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> KVSpec:
        """With the shapes of ``k`` ``[t, n, d]`` and ``v`` ``[t, n, e]``, in k's type."""
        return KVSpec(
            kv_heads=int(k.shape[1]),
            k_dim=int(k.shape[2]),
            v_dim=int(v.shape[2]),
            dtype=str(k.dtype).removeprefix("torch."),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if sinks is None else tuple(sinks.double().tolist()),
            alibi_slopes=self.alibi_slopes,
        )


def decode_spec(text: str) -> CallSpec:
    return msgspec.json.decode(text, type=CallSpec)


def _attention(
    q_thd: torch.Tensor,
    k_tnd: torch.Tensor,
    v_tne: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    spec: str,
) -> torch.Tensor:
    kv = decode_spec(spec).kv_spec(k_tnd, v_tne, sinks)
    o_the, _ = attend_plain(kv, q_thd, k_tnd.transpose(0, 1), v_tne.transpose(0, 1))
    return o_the


def _attention_fake(
    q_thd: torch.Tensor,
    k_tnd: torch.Tensor,
    v_tne: torch.Tensor,
    sinks: torch.Tensor | None,
    layer: int,
    spec: str,
) -> torch.Tensor:
    return q_thd.new_empty((q_thd.shape[0], q_thd.shape[1], v_tne.shape[2]))


attention = torch.library.custom_op(
    "cloverinfer::attention",
    _attention,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? sinks, int layer, str spec) -> Tensor",
)
attention.register_fake(_attention_fake)
ATTENTION = torch.ops.cloverinfer.attention.default
