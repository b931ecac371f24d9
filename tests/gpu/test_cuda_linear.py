"""Products with weights on a GPU against float64: `make test-gpu`.

Results start as NaN where the kernel writes into memory of its own making, and calls of different
shapes follow each other on one workspace, so that what one leaves behind would show in the next.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from cloverinfer.models.cuda_linear import OWN_ROWS, CudaLinear, gemm_of, gemm_serves
from cloverinfer.models.linear import make_linear
from cloverinfer.models.product import Linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gemm_of(0) is None,
    reason="no GPU of compute capability 9.0, or a build without CUDA kernels",
)

ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64]
SHAPES = [(8, 8), (72, 72), (136, 4096), (1000, 1112), (6144, 4096), (4096, 14336)]
RELATIVE = 4e-3
"""Of ||y - reference|| over ||reference||: one rounding to bfloat16, twice where there is a sum."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def product(n: int, k: int, bias: bool = False, batch_invariant: bool = False) -> CudaLinear:
    weight = (torch.randn((n, k), device="cuda") / k**0.5).bfloat16()
    return CudaLinear(weight, normal(n) if bias else None, batch_invariant)


def exact(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products(n: int, k: int, bias: bool) -> None:
    linear = product(n, k, bias)
    for rows in ROWS:
        x, residual = normal(rows, k), normal(rows, n)
        wanted = exact(linear, x)
        assert error(linear(x), wanted) < RELATIVE
        assert error(linear.add(x, residual), wanted + residual.double()) < RELATIVE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("n", "k"), [(16, 8), (144, 72), (1008, 1112), (28672, 4096)])
def test_gated_products(n: int, k: int, bias: bool) -> None:
    linear = product(n, k, bias)
    for rows in ROWS:
        x = normal(rows, k)
        gate, up = exact(linear, x).chunk(2, -1)
        assert error(linear.gated(x), F.silu(gate) * up) < RELATIVE


def test_small_products() -> None:
    """What racecheck runs: tiles in several parts, plain and gated."""
    plain, gate_up = product(136, 520), product(144, 264)
    for rows in (3, 40):
        x, residual = normal(rows, 520), normal(rows, 136)
        assert error(plain.add(x, residual), exact(plain, x) + residual.double()) < RELATIVE
        x = normal(rows, 264)
        gate, up = exact(gate_up, x).chunk(2, -1)
        assert error(gate_up.gated(x), F.silu(gate) * up) < RELATIVE


def test_many_outputs() -> None:
    linear = product(128256, 1024)
    for rows in (1, 16, 64):
        x = normal(rows, 1024)
        assert error(linear(x), exact(linear, x)) < RELATIVE


def test_rows_with_a_stride() -> None:
    linear = product(256, 512)
    x = normal(16, 3 * 512)[:, 512:1024]
    residual = normal(16, 2 * 256)[:, 256:]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear.add(x, residual), linear.add(x, residual.contiguous()))


def test_the_same_call_gives_the_same_bits() -> None:
    linears = [product(4096, 4096), product(512, 14336), product(28672, 1024)]
    inputs = [normal(32, linear.weight.shape[1]) for linear in linears]
    first = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    for _ in range(20):
        again = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1008, 14336)])
def test_a_row_alone_and_among_others(n: int, k: int) -> None:
    linear = product(n, k, batch_invariant=True)
    x, residual = normal(300, k), normal(300, n)
    whole = linear(x), linear.add(x, residual), linear.gated(x)
    for first, count in ((0, 1), (5, 3), (100, 16), (131, 70), (299, 1), (7, 128)):
        part = slice(first, first + count)
        some = linear(x[part]), linear.add(x[part], residual[part]), linear.gated(x[part])
        assert all(torch.equal(a[part], b) for a, b in zip(whole, some, strict=True))


def test_a_chain_of_products_captured_in_a_graph() -> None:
    """Each starts while the one before it still runs, and must not read its results too soon."""
    layers = [(product(768, 512), product(1024, 768), product(512, 512)) for _ in range(5)]

    def run(x: torch.Tensor, after: Callable[[], None]) -> torch.Tensor:
        for first, second, third in layers:
            hidden = first(x)
            after()
            hidden = second.gated(hidden)
            after()
            x = third.add(hidden, x)
            after()
        return x

    x = normal(16, 512)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run(x, lambda: None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            y = run(x, lambda: None)
        for _ in range(5):
            x.copy_(normal(16, 512))
            graph.replay()
            stream.synchronize()
            assert y.isfinite().all()
            assert torch.equal(y, run(x, stream.synchronize))


def test_what_the_kernel_does_not_serve_goes_to_torch() -> None:
    weight = torch.randn(64, 60, device="cuda")
    assert isinstance(make_linear(weight.bfloat16()[:, :56].contiguous()), CudaLinear)
    assert not gemm_serves(weight)
    assert not gemm_serves(weight.bfloat16())  # 60 inputs
    assert not gemm_serves(weight.bfloat16()[:, :56])  # rows with a stride
    linear = product(64, 64)
    assert linear.fuses_add(OWN_ROWS)
    assert not linear.fuses_add(OWN_ROWS + 1)
    for x in (normal(OWN_ROWS + 1, 64), normal(4, 72)[:, 1:65], normal(4, 65)[:, :64]):
        assert error(linear(x), exact(linear, x)) < RELATIVE
        assert error(linear.add(x, x), exact(linear, x) + x.double()) < RELATIVE
        gate, up = exact(linear, x).chunk(2, -1)
        assert error(linear.gated(x), F.silu(gate) * up) < 2 * RELATIVE
    assert linear(normal(0, 64)).shape == (0, 64)
