"""Graphs rewritten to call chains give what they gave, and say where a chain is all of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from cloverinfer.models.arena import Arenas
from cloverinfer.models.fuse import Fused, fuse
from cloverinfer.models.native import native_serves
from cloverinfer.models.operators import expert_linear, exporting
from cloverinfer.models.places import Bound, Place
from cloverinfer.models.threads import alone, kernel_threads

pytestmark = pytest.mark.skipif(
    not native_serves(torch.bfloat16, torch.device("cpu")),
    reason="needs AVX2 or better for packed products",
)
SIZE, HEADS, DIM, TOKENS = 32, 4, 8, 7


class Layer(nn.Module):
    """A layer from attention to the next one's q, k and v; a parallel branch, partial rotation."""

    shapes = ((SIZE, SIZE), (48, SIZE), (SIZE, 48), (SIZE,), (SIZE,), (3 * SIZE, SIZE), (3 * SIZE,))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, up, down, weight, bias, qkv, qkv_bias, attn, hidden, cos, sin = given
        x, tokens = hidden.movedim(0, 1), hidden.shape[0]
        ffn = F.linear(F.gelu(F.linear(x, up)), down)
        x = x + F.linear(attn[None].reshape(1, tokens, -1), out) + ffn * 0.5
        normed = F.layer_norm(x, (SIZE,), weight, bias, 1e-5)
        parts = F.linear(normed, qkv, qkv_bias).view(1, tokens, HEADS, 3 * DIM).transpose(1, 2)
        q, k, v = parts.split(DIM, -1)
        c, s = cos.movedim(0, 1)[:, None], sin.movedim(0, 1)[:, None]
        q, k = self.turn(q, c, s), self.turn(k, c, s)
        qkv_thd = (one[0].transpose(0, 1) for one in (q, k, v))
        return *qkv_thd, x.movedim(1, 0), cos

    @staticmethod
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, rest = x[..., :4], x[..., 4:]
        turned = torch.cat((-first[..., 2:], first[..., :2]), -1)
        return torch.cat((first * cos + turned * sin, rest), -1)


def layer_rows(tokens: int) -> list[torch.Tensor]:
    shapes = ((tokens, HEADS, DIM), (tokens, 1, SIZE), (tokens, 1, 4), (tokens, 1, 4))
    return randoms(shapes, seed=tokens)


def randoms(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(s, generator=generator) * s[-1] ** -0.5).bfloat16() for s in shapes]


def fused(
    module: nn.Module,
    weights: Sequence[torch.Tensor],
    rows: Sequence[torch.Tensor],
    lowering: str = "eager",
) -> Fused:
    tokens = torch.export.Dim("tokens", min=1, max=4096)
    dims = (*(None for _ in weights), *({0: tokens} for _ in rows))
    with exporting():
        program = torch.export.export(
            module, (*weights, *rows), dynamic_shapes=(dims,), strict=False
        )
        graph = program.run_decompositions({}).graph_module
    return fuse(graph, len(weights), lowering, chained=True)


def made_of(
    one: Fused, weights: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the graph takes, and what its addresses are of."""
    given, kept = [], []

    def make(place: Place) -> torch.Tensor:
        return place.make([weights[i] for i in place.parts], Arenas())

    for place in one.places:
        if isinstance(place, Bound):
            tensors = [make(each) for each in place.places]
            kept += tensors
            given.append(torch.tensor([x.data_ptr() for x in tensors], dtype=torch.int64))
        else:
            given.append(make(place))
    return given, kept


def chains(one: Fused) -> int:
    return sum("chain" in str(node.target) for node in one.graph.graph.nodes if not is_input(node))


def is_input(node: torch.fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target is operator.getitem


def agree(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        assert (one.float() - other.float()).abs().max() <= 0.03 * other.float().abs().max()


def wide(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.float() for x in tensors]


@pytest.mark.parametrize("tokens", [1, 9])
def test_a_layer_is_one_chain(tokens: int) -> None:
    weights = randoms(Layer.shapes)
    one = fused(Layer(), weights, layer_rows(TOKENS))
    given, kept = made_of(one, weights)
    rows = layer_rows(tokens)
    expected = Layer()(*wide(weights), *wide(rows))
    assert chains(one) == 1
    agree(one.graph(*given, *rows), expected)
    assert one.direct is not None
    assert one.direct.makes_first(3)
    agree(one.direct(given, rows), expected)
    assert one.direct(given, rows)[4] is rows[2]  # passed on
    out = [torch.zeros(tokens, HEADS * DIM + 9).bfloat16() for _ in range(3)]
    wanted = [to[:, 1 : 1 + HEADS * DIM].view(tokens, HEADS, DIM) for to in out]
    agree(one.direct(given, rows, wanted), expected)
    agree(wanted, expected[:3])
    assert kept


def test_strided_rows_are_taken_as_they_are() -> None:
    weights = randoms(Layer.shapes)
    one = fused(Layer(), weights, layer_rows(TOKENS))
    given, _kept = made_of(one, weights)
    rows = layer_rows(5)
    apart = [torch.zeros((5, 2, *row.shape[1:])).bfloat16()[:, 0].copy_(row) for row in rows]
    apart[0] = rows[0].transpose(1, 2).contiguous().transpose(1, 2)  # must be copied
    assert one.direct is not None
    for found, expected in zip(one.direct(given, apart), one.direct(given, rows), strict=True):
        assert torch.equal(found, expected)
    assert [len(x) for x in one.direct(given, [row[:0] for row in rows])] == [0] * 5


class Between(nn.Module):
    """What only PyTorch computes stands between two products."""

    shapes = ((SIZE, SIZE), (SIZE, SIZE))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, x = given
        inner = F.linear(x[None], first)
        return (F.linear(torch.softmax(inner, -1), second) + inner,)


@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_chains_and_pytorch_take_turns(lowering: str) -> None:
    weights = randoms(Between.shapes)
    one = fused(Between(), weights, randoms(((TOKENS, SIZE),)), lowering)
    assert (chains(one), one.direct, one.small) == (2, None, True)
    given, _kept = made_of(one, weights)
    rows = randoms(((5, SIZE),), seed=5)
    agree(one.graph(*given, *rows), Between()(*wide(weights), *wide(rows)))


class Written(nn.Module):
    """Products as GPT-2 and Falcon write them; a norm whose weight is 1 more than what is stored,
    over more heads than one."""

    shapes = ((SIZE, 48), (48,), (SIZE, 48), (8,))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        stored, bias, weight, scale, x = given
        inner = torch.addmm(bias, x, stored)
        y = torch.relu(inner) @ weight.T
        heads = y.view(-1, HEADS, 8).float()
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((normed * (1.0 + scale.float())).type_as(y),)


def test_products_and_norms_as_they_are_written() -> None:
    weights = randoms(Written.shapes)
    one = fused(Written(), weights, randoms(((TOKENS, SIZE),)))
    given, _kept = made_of(one, weights)
    rows = randoms(((5, SIZE),), seed=5)
    assert one.direct is not None
    agree(one.direct(given, rows), Written()(*wide(weights), *wide(rows)))


class Experts(nn.Module):
    """Two matrices of three experts, one stored the other way round."""

    shapes = ((3, 24, SIZE), (3, 24, SIZE), (3, SIZE))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, bias, x = given
        chosen = (x[:, 0] > 0).long() * 2  # the second is never wanted
        inner = expert_linear(x, first, None, chosen, False)
        return (expert_linear(F.silu(inner), second, bias, chosen, True),)


@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_are_panels(tokens: int) -> None:
    weights = randoms(Experts.shapes)
    one = fused(Experts(), weights, randoms(((TOKENS, SIZE),)))
    assert "expert_linear.default" not in str(one.graph.graph)
    given, _kept = made_of(one, weights)
    rows = randoms(((tokens, SIZE),), seed=5)
    agree(one.graph(*given, *rows), Experts()(*wide(weights), *wide(rows)))


class Interleaved(nn.Module):
    """Every other number, which a chain does not copy."""

    shapes = ((SIZE, SIZE), (SIZE // 2, SIZE // 2))

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, x = given
        inner = F.linear(x[None], first).view(1, -1, HEADS, DIM)
        even, odd = inner[..., ::2], inner[..., 1::2]
        both = torch.cumsum(even, -1) - odd
        return F.linear(both.flatten(2), second), even.transpose(1, 2)


def test_what_no_chain_copies_is_pytorchs() -> None:
    weights = randoms(Interleaved.shapes)
    one = fused(Interleaved(), weights, randoms(((TOKENS, SIZE),)))
    assert chains(one) == 2
    given, _kept = made_of(one, weights)
    rows = randoms(((5, SIZE),), seed=5)
    agree(one.graph(*given, *rows), Interleaved()(*wide(weights), *wide(rows)))


class NoProduct(nn.Module):
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, x = given
        return (F.layer_norm(x * 2, (SIZE,), weight) + x,)


def test_without_products_a_graph_stays_as_it_is() -> None:
    (weight,) = randoms(((SIZE,),))
    one = fused(NoProduct(), [weight], randoms(((TOKENS, SIZE),)))
    assert (chains(one), one.direct) == (0, None)
    (row,) = randoms(((5, SIZE),), seed=5)
    agree(one.graph(weight, row), NoProduct()(weight.float(), row.float()))


def test_kernels_keep_their_threads_while_pytorch_has_one() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with alone(4):
            assert (torch.get_num_threads(), kernel_threads()) == (1, 3)
        with alone(64):
            assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
        assert (torch.get_num_threads(), kernel_threads()) == (3, 3)
    finally:
        torch.set_num_threads(before)
