"""Stages for a GPU: rotations cut off where that changes nothing, and no small operator left."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import fx, nn

from cloverinfer.attention.base import FusedRows
from cloverinfer.models.arena import Arenas
from cloverinfer.models.fuse import Fused, fuse
from cloverinfer.models.kernel_operators import DIRECT, turn
from cloverinfer.models.operators import exporting
from cloverinfer.models.slots import VIEWS
from cloverinfer.models.turning import Turn, equal_halves

TOKENS, HEADS, KV_HEADS, SIZE, HIDDEN, FFN = 5, 4, 2, 8, 24, 40
SHAPES = {
    "out": (HIDDEN, HEADS * SIZE),
    "post": (HIDDEN,),
    "gate": (FFN, HIDDEN),
    "up": (FFN, HIDDEN),
    "down": (HIDDEN, FFN),
    "norm": (HIDDEN,),
    "q": (HEADS * SIZE, HIDDEN),
    "k": (KV_HEADS * SIZE, HIDDEN),
    "v": (KV_HEADS * SIZE, HIDDEN),
    "frequencies": (SIZE // 2,),
}
HALVES = frozenset({1, 2})
"""cos and sin, of the carry."""


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return weight * (wide * root).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


@dataclass(frozen=True)
class How:
    """How a stage differs from Llama's."""

    first: bool = False
    """Whether it makes its tables itself."""
    partial: bool = False
    """Whether half of each head is rotated."""
    keeps: bool = False
    """Whether keys before their rotation are carried."""
    crossed: bool = False
    """Whether keys are rotated the other way."""
    turned_values: bool = False
    unlike: bool = False
    """Whether the tables' halves differ."""


class Stage(nn.Module):
    """A layer's end and the next one's beginning, as a compiled Llama has them: weights, then
    positions, what attention gave, hidden rows, cos and sin."""

    def __init__(self, how: How) -> None:
        super().__init__()
        self.how = how

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w = dict(zip(SHAPES, given, strict=False))
        positions, attended, hidden, cos, sin = given[len(SHAPES) :]
        hidden, tokens = hidden.movedim(0, 1), hidden.shape[0]
        hidden = hidden + F.linear(attended[None].reshape(1, tokens, -1), w["out"])
        x = normed(hidden, w["post"])
        x = F.silu(F.linear(x, w["gate"])) * F.linear(x, w["up"])
        hidden = hidden + F.linear(x, w["down"])
        x = normed(hidden, w["norm"])
        q, k, v = (F.linear(x, w[name]).view(1, tokens, -1, SIZE).transpose(1, 2) for name in "qkv")
        cos, sin = self.tables(positions, w["frequencies"], cos, sin)
        tables = cos.movedim(0, 1)[None], sin.movedim(0, 1)[None]
        turned_q, turned_k = self.turned(q, tables), self.turned(k, tables, self.how.crossed)
        v = self.turned(v, tables) if self.how.turned_values else v
        kept = (k[0].transpose(0, 1),) if self.how.keeps else ()
        qkv = (one[0].transpose(0, 1) for one in (turned_q, turned_k, v))
        return *qkv, hidden.movedim(1, 0), cos, sin, *kept

    def tables(
        self, at: torch.Tensor, by: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.how.first:
            return cos, sin
        angles = at[:, None, None].to(torch.float32) * by.float()
        angles = torch.cat((angles, angles + 1 if self.how.unlike else angles), -1)
        return angles.cos().to(cos.dtype), angles.sin().to(cos.dtype)

    def turned(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, ...], crossed: bool = False
    ) -> torch.Tensor:
        cos, sin = tables[::-1] if crossed else tables
        if not self.how.partial:
            return rotated(x, cos, sin)
        half = SIZE // 2
        return torch.cat(
            (rotated(x[..., :half], cos[..., :half], sin[..., :half]), x[..., half:]), -1
        )


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(s, generator=generator) * s[-1] ** -0.5 for s in SHAPES.values()]
    angles = torch.rand((TOKENS, 1, SIZE // 2), generator=generator).repeat(1, 1, 2)
    attended = torch.randn((TOKENS, HEADS, SIZE), generator=generator)
    hidden = torch.randn((TOKENS, 1, HIDDEN), generator=generator)
    positions = torch.tensor([3, 0, 9, 4, 200])
    floats = *weights, attended, hidden, angles.cos(), angles.sin()
    given = [one.to(torch.float16) for one in floats]
    return [*given[: len(SHAPES)], positions, *given[len(SHAPES) :]]


def traced(how: How) -> fx.GraphModule:
    given = inputs()
    tokens = torch.export.Dim("tokens", min=2)
    shapes = ((None,) * len(SHAPES) + ({0: tokens},) * (len(given) - len(SHAPES)),)
    with exporting():
        program = torch.export.export(Stage(how), tuple(given), dynamic_shapes=shapes)
        module = program.run_decompositions({}).graph_module
    for node in list(module.graph.nodes):  # as capturing does
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    return module


def run(fused: Fused) -> tuple[torch.Tensor, ...]:
    given = inputs()
    made = [place.make([given[i] for i in place.parts], Arenas()) for place in fused.places]  # type: ignore[union-attr]
    results = fused.graph(*made, *given[len(SHAPES) :])
    if fused.turn is None:
        return tuple(results)
    qkv_thd, cos, sin, *carry = results
    rows = FusedRows(qkv_thd, fused.turn.kv_heads, torch.arange(TOKENS), (cos, sin))
    turn(rows, rows.parts)
    return *rows.parts, *carry


def left(fused: Fused) -> set[object]:
    """Operators that compute, and are not kernels of ours."""
    ours = {*DIRECT, *DIRECT.values(), *VIEWS, operator.getitem, torch.ops.aten.sym_size.int}
    calls = (node for node in fused.graph.graph.nodes if node.op == "call_function")
    return {node.target for node in calls} - ours


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_layer_is_kernels_of_ours_alone(lowering: str) -> None:
    graph = traced(How())
    assert equal_halves(graph.graph, len(SHAPES), HALVES) == HALVES
    fused = fuse(graph, len(SHAPES), lowering, halves=HALVES)
    assert fused.turn == Turn(KV_HEADS)
    assert not left(fused)
    calls = [node for node in fused.graph.graph.nodes if node.target in (*DIRECT, *DIRECT.values())]
    assert len(calls) == 4  # two products with the norm that follows, the gate, and q, k, v
    for one, other in zip(run(fused), Stage(How())(*inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)


def test_tables_that_a_stage_makes_are_looked_at() -> None:
    graph = traced(How(first=True))
    assert equal_halves(graph.graph, len(SHAPES), frozenset()) == HALVES
    fused = fuse(graph, len(SHAPES), "inductor", halves=frozenset())
    assert fused.turn == Turn(KV_HEADS)
    for one, other in zip(run(fused), Stage(How(first=True))(*inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)


@pytest.mark.parametrize(
    ("how", "carried"),
    [
        (How(), frozenset({1})),
        (How(partial=True), HALVES),
        (How(keeps=True), HALVES),
        (How(crossed=True), HALVES),
        (How(turned_values=True), HALVES),
        (How(first=True, unlike=True), frozenset()),
    ],
    ids=["unknown", "partial", "keeps", "crossed", "values", "unlike"],
)
def test_other_rotations_stay_in_the_graph(how: How, carried: frozenset[int]) -> None:
    fused = fuse(traced(how), len(SHAPES), "eager", halves=carried)
    assert fused.turn is None
    for one, other in zip(run(fused), Stage(how)(*inputs()), strict=True):
        torch.testing.assert_close(one, other, rtol=0.01, atol=0.01)
