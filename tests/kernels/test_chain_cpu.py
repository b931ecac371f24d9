"""Chains of a graph's operators (``csrc/dense_cpu/chain.h``) against float64 arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from cloverinfer import _native
from cloverinfer.models.arena import Arenas
from cloverinfer.models.chain import Act, Map, Operand, Program, Step, _chain
from cloverinfer.models.panels import panels_of

ISAS = _native.dense_isas()
EXPECTED = {
    Map.COPY: lambda a, b: a,
    Map.ADD: lambda a, b: a + b,
    Map.SUBTRACT: lambda a, b: a - b,
    Map.MULTIPLY: lambda a, b: a * b,
    Map.ADD_SCALAR: lambda a, b: a + 0.75,
    Map.SCALE: lambda a, b: a * 0.75,
    Map.SILU: lambda a, b: F.silu(a),
    Map.GELU: lambda a, b: F.gelu(a),
    Map.GELU_TANH: lambda a, b: F.gelu(a, approximate="tanh"),
    Map.RELU: lambda a, b: F.relu(a),
    Map.SIGMOID: lambda a, b: torch.sigmoid(a),
    Map.TANH: lambda a, b: torch.tanh(a),
    Map.SQUARE: lambda a, b: a**2,
    Map.CUBE: lambda a, b: a**3,
}
TWO = (Map.ADD, Map.SUBTRACT, Map.MULTIPLY)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run(
    isa: str, program: Program, rows: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    code = [
        (one.act, one.operands, one.weights, one.size, one.map, one.centred, one.scalar)
        for one in program.steps
    ]
    counts = program.inputs, program.outputs, program.weights
    chain = _native.CpuChain(threads=2, isa=isa, counts=counts, widths=program.widths, code=code)
    made = [torch.zeros((len(rows[0]), width), dtype=torch.bfloat16) for width in program.made]
    addresses = torch.tensor([one.data_ptr() for one in weights], dtype=torch.int64)
    places = [(row.data_ptr(), row.stride(0)) for row in (*rows, *made)]
    chain.run((addresses.data_ptr(), len(addresses)), len(rows[0]), places)
    return made


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("map", list(Map))
def test_maps(isa: str, map: Map) -> None:
    a, b = randn(3, 45), randn(3, 45, seed=1)
    a[0, :4] = torch.tensor([-100.0, 100.0, -20.0, 0.0])
    operand = (0, 0, 1, 45, 45)
    reads = ((0, *operand[1:]), (1, *operand[1:]))
    operands = ((2, *operand[1:]), *reads[: 2 if map in TWO else 1])
    step = Step(Act.MAP, operands, map=map, scalar=0.75)
    (found,) = run(isa, Program(2, 1, 0, (45, 45, 45), (step,)), [a, b], [])
    close(found, EXPECTED[map](a.double(), b.double()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 9])
def test_norms_of_heads_in_wider_rows(isa: str, tokens: int) -> None:
    """Three heads of 20 numbers, 24 apart, four numbers into each row."""
    x, weight, bias = randn(tokens, 80), randn(20, seed=1).float(), randn(20, seed=2).float()
    heads = x[:, 4:76].view(tokens, 3, 24)[:, :, :20].double()
    to, of = (1, 0, 3, 20, 20), (0, 4, 3, 24, 20)
    for centred in (False, True):
        step = Step(Act.NORM, (to, of), weights=(0, 1), centred=centred, scalar=1e-5)
        (found,) = run(isa, Program(1, 1, 2, (80, 60), (step,)), [x], [weight, bias])
        part = heads - heads.mean(-1, keepdim=True) if centred else heads
        expected = part * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-5)
        close(found, (expected * weight.double() + bias.double()).flatten(1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", [16, 22, 64])
def test_turning(isa: str, size: int) -> None:
    """Two heads; cos and sin are the same for both."""
    x, cos, sin = randn(5, 2 * size), randn(5, size, seed=1), randn(5, size, seed=2)
    both: Operand = (0, 0, 2, size, size)
    reads = (both, (1, 0, 2, 0, size), (2, 0, 2, 0, size))
    program = Program(
        3, 1, 0, (2 * size, size, size, 2 * size), (Step(Act.TURN, ((3, *both[1:]), *reads)),)
    )
    (found,) = run(isa, program, [x, cos, sin], [])
    heads = x.view(5, 2, size).double()
    turned = torch.cat((-heads[..., size // 2 :], heads[..., : size // 2]), -1)
    expected = heads * cos.double()[:, None] + turned * sin.double()[:, None]
    close(found, expected.flatten(1))


def ffn(tokens: int) -> tuple[Program, list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Norm, gated product, product and what is added, of rows that lie 40 apart."""
    x = randn(tokens, 40)[:, :32]
    gate_up, down, bias = randn(96, 32, seed=1), randn(32, 48, seed=2), randn(32, seed=3)
    steps = (
        Step(Act.NORM, ((2, 0, 1, 32, 32), (0, 0, 1, 32, 32)), scalar=1e-5),
        Step(Act.PRODUCT, ((3, 0, 1, 48, 48), (2, 0, 1, 32, 32)), (0, -1), (48, 32, 2)),
        Step(
            Act.PRODUCT,
            ((1, 0, 1, 32, 32), (3, 0, 1, 48, 48), (0, 0, 1, 32, 32)),
            (1, 2),
            (32, 48, 1),
        ),
    )
    arenas = Arenas()
    weights = [panels_of(gate_up, 2, arenas), panels_of(down, 1, arenas), bias]
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    gate, up = (normed @ gate_up.double().T).chunk(2, -1)
    expected = wide + (F.silu(gate) * up) @ down.double().T + bias.double()
    return Program(1, 1, 3, (32, 32, 32, 48), steps), [x], weights, expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("tokens", [1, 9, 600])
def test_products_one_after_the_other(isa: str, tokens: int) -> None:
    program, rows, weights, expected = ffn(tokens)
    (found,) = run(isa, program, rows, weights)
    assert (found.double() - expected).abs().max() < 0.02 * expected.abs().max()
    (alone,) = run(isa, program, [rows[0][:1]], weights)
    assert torch.equal(alone[0], found[0])  # whatever else is in the step


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ({"operands": ((1, 0, 1, 33, 33), (0, 0, 1, 33, 33))}, "outside of its row"),
        ({"operands": ((9, 0, 1, 32, 32), (0, 0, 1, 32, 32))}, "no such buffer"),
        ({"operands": ((0, 0, 1, 32, 32), (1, 0, 1, 32, 32))}, "inputs are not written"),
        ({"operands": ((1, 0, 1, 32, 32),)}, "number of operands"),
        ({"act": 9}, "no such act"),
        ({"weights": (0, -1)}, "no such weight"),
        ({"operands": ((1, 0, 1, 16, 16), (0, 0, 1, 32, 32))}, "of one shape"),
    ],
)
def test_code_that_reaches_outside_is_refused(step: dict[str, Any], reason: str) -> None:
    fields: dict[str, Any] = {"act": 1, "operands": ((1, 0, 1, 32, 32), (0, 0, 1, 32, 32))}
    made = Step(**(fields | step))
    with pytest.raises(ValueError, match=reason):
        _chain(Program(1, 1, 0, (32, 32), (made,)).text(), 1)


def test_places_are_checked() -> None:
    step = Step(Act.MAP, ((1, 0, 1, 32, 32), (0, 0, 1, 32, 32)))
    chain = _chain(Program(1, 1, 0, (32, 32), (step,)).text(), 1)
    x = randn(2, 32)
    with pytest.raises(ValueError, match="a place for each"):
        chain.run((0, 0), 2, [(x.data_ptr(), 32)])
    with pytest.raises(ValueError, match="rows overlap"):
        chain.run((0, 0), 2, [(x.data_ptr(), 32), (x.data_ptr(), 31)])
    with pytest.raises(ValueError, match="number of weights"):
        chain.run((0, 1), 2, [(x.data_ptr(), 32), (x.data_ptr(), 32)])
