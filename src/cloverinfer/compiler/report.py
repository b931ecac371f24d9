"""What a compiled model consists of: its attention calls, its parts, and what crosses each cut.

All figures are per token, but a part's weights. They come from the graphs; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from torch import fx

from .capture import Captured
from .partition import Stage
from .targets import PRODUCTS


@dataclass(frozen=True)
class Call:
    """One call of attention."""

    layer: int
    heads: int
    spec: dict[str, Any]
    """Its ``KVSpec``; of sinks and slopes only their number."""
    kv_bytes: int
    """Stored per token."""
    there_bytes: int
    """q, k and v to the attention node."""
    back_bytes: int
    """o from it."""
    flops_per_context_token: int
    """Of one query token, for each token that it sees."""


@dataclass(frozen=True)
class Part:
    """One stage."""

    index: int
    parameters: int
    weight_bytes: int
    flops: int
    """Of products with weights; experts count as often as a token goes through them."""
    products: int
    nodes: int
    carry_bytes: int
    """What stays for, or goes to, the next part beside o."""
    carry: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    name: str
    dtype: str
    parameters: int
    weight_bytes: int
    parts: tuple[Part, ...]
    calls: tuple[Call, ...]
    at_attention: bool
    """Whether attention lies between the parts, not in them."""

    @property
    def kv_bytes(self) -> int:
        return sum(call.kv_bytes for call in self.calls)

    @property
    def hop_bytes(self) -> int:
        """All layers, there and back."""
        return sum(call.there_bytes + call.back_bytes for call in self.calls)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"kv_bytes": self.kv_bytes, "hop_bytes": self.hop_bytes}


def make_report(name: str, captured: Captured, stages: Sequence[Stage]) -> Report:
    tensors = captured.tensors.values()
    return Report(
        name=name,
        dtype=str(captured.logits.meta["val"].dtype).removeprefix("torch."),
        parameters=sum(tensor.numel() for tensor in tensors),
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        parts=tuple(_part(captured, index, stage) for index, stage in enumerate(stages)),
        calls=tuple(_call(captured, layer, node) for layer, node in enumerate(captured.calls)),
        at_attention=any(stage.asks_attention for stage in stages),
    )


def _call(captured: Captured, layer: int, node: fx.Node) -> Call:
    q, k, v = (x.meta["val"] for x in node.args[:3])  # type: ignore[union-attr]
    spec = captured.spec_of(node)
    heads = int(q.shape[1])
    plain = msgspec.to_builtins(spec)
    for field in ("sinks", "alibi_slopes"):
        plain[field] = len(plain[field]) if plain[field] else None
    return Call(
        layer=layer,
        heads=heads,
        spec=plain,
        kv_bytes=spec.token_bytes,
        there_bytes=sum(_row_bytes(x) for x in (q, k, v)),
        back_bytes=heads * spec.v_dim * q.dtype.itemsize,
        flops_per_context_token=2 * heads * (spec.k_dim + spec.v_dim),
    )


def _part(captured: Captured, index: int, stage: Stage) -> Part:
    weights = [captured.tensors[name] for name in stage.weights]
    nodes = [node for node in stage.graph.nodes if node.op == "call_function"]
    products = [node for node in nodes if node.target in PRODUCTS]
    carried = {node.name: node for node in captured.graph.nodes if node.name in stage.carry_out}
    return Part(
        index=index,
        parameters=sum(tensor.numel() for tensor in weights),
        weight_bytes=sum(tensor.nbytes for tensor in weights),
        flops=sum(product_flops(node) for node in products),
        products=len(products),
        nodes=len(nodes),
        carry_bytes=sum(_row_bytes(node.meta["val"]) for node in carried.values()),
        carry=stage.carry_out,
    )


def product_flops(node: fx.Node) -> int:
    """Multiplications and additions of a product, per token."""
    out = node.meta["val"]
    first = node.args[1 if node.target is torch.ops.aten.addmm.default else 0]
    assert isinstance(first, fx.Node)
    return 2 * _row_elements(out) * int(first.meta["val"].shape[-1])


def _row_bytes(val: torch.Tensor) -> int:
    return _row_elements(val) * val.dtype.itemsize


def _row_elements(val: torch.Tensor) -> int:
    """Elements per token: a dimension of ``2 * t`` counts as two."""
    elements = 1
    for size in val.shape:
        if isinstance(size, int):
            elements *= size
        else:
            symbol = next(iter(size.node.expr.free_symbols))
            elements *= int(size.node.expr.subs(symbol, 1))
    return elements
