"""Graphs rewritten for the kernels of native halves give what they gave, with fewer calls."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import fx, nn

from cloverinfer.models.arena import Arenas
from cloverinfer.models.fuse import Fused, fuse
from cloverinfer.models.native import native_serves
from cloverinfer.models.operators import exporting
from cloverinfer.models.panels import multiply, panels_of
from cloverinfer.models.shorten import rotate

CPU = torch.device("cpu")
SIZE, FFN = 32, 48
SHAPES = {
    "norm": (SIZE,),
    "q": (SIZE, SIZE),
    "k": (16, SIZE),
    "v": (16, SIZE),
    "qb": (SIZE,),
    "kb": (16,),
    "vb": (16,),
    "gate": (FFN, SIZE),
    "up": (FFN, SIZE),
    "down": (SIZE, FFN),
}
native = pytest.mark.skipif(
    not native_serves(torch.bfloat16, CPU), reason="needs AVX2 or better for packed products"
)


class Layer(nn.Module):
    """Weights first, in the order of ``SHAPES``; then rows, cos and sin."""

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        norm, q, k, v, qb, kb, vb, gate, up, down, x, cos, sin = given
        wide = x.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        normed = norm * (wide * root).to(x.dtype)
        heads = F.linear(normed, q, qb).view(1, -1, 2, 16)
        turned = torch.cat((-heads[..., 8:], heads[..., :8]), dim=-1)
        ffn = F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)
        kv = F.linear(normed, k, kb), F.linear(normed, v, vb)
        return heads * cos + turned * sin, *kv, x + ffn


def inputs(dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    weights = [torch.randn(s, generator=generator) * s[-1] ** -0.5 for s in SHAPES.values()]
    rows = [torch.randn(s, generator=generator) for s in ((1, 7, SIZE), (7, 1, 16), (7, 1, 16))]
    return [w.to(dtype) for w in weights], [row.to(dtype) for row in rows]


def traced(dtype: torch.dtype) -> fx.GraphModule:
    weights, rows = inputs(dtype)
    return exported(Layer(), *weights, *rows)


def exported(module: nn.Module, *given: torch.Tensor) -> fx.GraphModule:
    with exporting():
        return torch.export.export(module, given).run_decompositions({}).graph_module


def calls(fused: Fused) -> list[str]:
    nodes = [node for node in fused.graph.graph.nodes if node.op == "call_function"]
    return [getattr(node.target, "__name__", str(node.target)) for node in nodes]


@native
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_a_rewritten_layer_gives_what_it_gave(lowering: str) -> None:
    weights, rows = inputs(torch.bfloat16)
    expected = Layer()(*(x.float() for x in (*weights, *rows)))
    fused = fuse(traced(torch.bfloat16), len(weights), lowering)
    made = [place.make([weights[i] for i in place.parts], Arenas()) for place in fused.places]
    found = fused.graph(*made, *rows)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() < 0.03 * other.abs().max()
    assert [place.parts for place in fused.places if place.folds] == [(1, 2, 3), (7, 8), (9,)]
    assert [place.folds for place in fused.places if place.folds] == [1, 2, 1]
    names = calls(fused)
    products = [name for name in names if name in ("product", "linear.default")]
    assert len(products) == 3
    assert "add.Tensor" not in names or lowering == "inductor"  # the residual, and the rotation
    assert ("rotate" in names, "rms_norm.default" in names) == (lowering == "eager",) * 2


def test_what_other_code_reads_too_is_left_alone() -> None:
    class Twice(nn.Module):
        def forward(
            self, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, x: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            one = F.linear(x, gate)
            product = F.linear(x[:, :48], down)
            return F.silu(one) * F.linear(x, up), one, product + x[:, :32], product

    generator = torch.Generator().manual_seed(5)
    shapes = ((48, 64), (48, 64), (32, 48), (5, 64))
    given = [torch.randn(shape, generator=generator) for shape in shapes]
    expected = Twice()(*given)
    fused = fuse(exported(Twice(), *given), 3, "inductor")
    made = [place.make([given[i] for i in place.parts], Arenas()) for place in fused.places]
    for one, other in zip(fused.graph(*made, given[3]), expected, strict=True):
        torch.testing.assert_close(one, other)
    assert [place.parts for place in fused.places] == [(0, 1), (2,)]


@native
@pytest.mark.parametrize("tokens", [0, 1, 9, 70])
@pytest.mark.parametrize("outputs", [16, 40])
def test_single_products_with_panels(tokens: int, outputs: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    x, w, b, r = (
        torch.randn(shape, generator=generator).bfloat16()
        for shape in ((tokens, 100), (outputs, 100), (outputs,), (tokens, outputs))
    )
    panels = panels_of(w, 1, Arenas())
    expected = x.float() @ w.float().T
    for bias, residual in ((None, None), (b, None), (b, r)):
        wanted = expected + (0 if bias is None else b.float())
        wanted = wanted + (0 if residual is None else r.float())
        found = multiply(x, panels, bias, residual, (outputs, 1))
        torch.testing.assert_close(found.float(), wanted, rtol=8e-3, atol=0.05)
    gate, up = expected.chunk(2, -1)
    found = multiply(x, panels_of(w, 2, Arenas()), None, None, (outputs // 2, 2))
    torch.testing.assert_close(found.float(), F.silu(gate) * up, rtol=1e-2, atol=0.2)
    strided = torch.zeros((tokens, 130), dtype=torch.bfloat16)[:, :100].copy_(x)
    assert torch.equal(
        multiply(strided, panels, b, r, (outputs, 1)), multiply(x, panels, b, r, (outputs, 1))
    )


def test_rotation_is_the_one_that_is_replaced() -> None:
    generator = torch.Generator().manual_seed(0)
    x, cos, sin = (
        torch.randn(s, generator=generator) for s in ((3, 2, 16), (3, 1, 16), (3, 1, 16))
    )
    turned = torch.cat((-x[..., 8:], x[..., :8]), -1)
    torch.testing.assert_close(rotate(x, cos, sin), x * cos + turned * sin)
