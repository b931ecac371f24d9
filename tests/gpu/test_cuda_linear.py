"""Products with weights on a GPU, bfloat16 and float8, against float64: `make test-gpu`.

Results start as NaN where the kernel writes into memory of its own making, and calls of different
shapes follow each other on one workspace, so that what one leaves behind would show in the next.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from cloverinfer.models.cuda_linear import OWN_ROWS, CudaLinear, gemm_of, gemm_serves
from cloverinfer.models.fp8 import LARGEST, Fp8Linear, interleave, make_fp8_linear
from cloverinfer.models.linear import make_linear
from cloverinfer.models.product import Linear

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or gemm_of(0) is None,
    reason="no GPU of compute capability 9.0, or a build without CUDA kernels",
)

ROWS = [1, 2, 7, 8, 9, 16, 17, 32, 33, 63, 64]
SHAPES = [
    *[(False, *shape) for shape in [(8, 8), (72, 72), (136, 4096), (1000, 1112)]],
    *[(True, *shape) for shape in [(16, 16), (80, 80), (144, 4096), (1008, 1120)]],
    *[(float8, *shape) for shape in [(6144, 4096), (4096, 14336)] for float8 in (False, True)],
]
GATED_SHAPES = [
    *[(False, *shape) for shape in [(16, 8), (144, 72), (1008, 1112)]],
    *[(True, *shape) for shape in [(16, 16), (144, 80), (1008, 1120)]],
    *[(float8, 28672, 4096) for float8 in (False, True)],
]
"""Whether weights are in float8, outputs, inputs."""
BOTH = pytest.mark.parametrize("float8", [False, True], ids=["bfloat16", "float8"])
RELATIVE = 4e-3
"""Of ||y - reference|| over ||reference||: one rounding to bfloat16, twice where there is a sum."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def product(
    n: int, k: int, bias: bool = False, batch_invariant: bool = False, float8: bool = False
) -> Linear:
    weight = (torch.randn((n, k), device="cuda") / k**0.5).bfloat16()
    make = make_fp8_linear if float8 else plain_product
    linear = make(weight, normal(n) if bias else None, batch_invariant)
    assert isinstance(linear, CudaLinear)
    return linear


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None, batch_invariant: bool) -> Linear:
    return make_linear(weight, bias, batch_invariant=batch_invariant)


def exact(linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """By the weights as they are stored."""
    bias = None if linear.bias is None else linear.bias.double()
    weight = linear.weight.double()
    if linear.scale_o is not None:
        weight *= linear.scale_o[:, None]
        x = interleave(x)
    return F.linear(x.double(), weight, bias)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("float8", "n", "k"), SHAPES)
def test_products(float8: bool, n: int, k: int, bias: bool) -> None:
    linear = product(n, k, bias, float8=float8)
    for rows in ROWS:
        x, residual = normal(rows, k), normal(rows, n)
        wanted = exact(linear, x)
        assert error(linear(x), wanted) < RELATIVE
        assert error(linear.add(x, residual), wanted + residual.double()) < RELATIVE


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("float8", "n", "k"), GATED_SHAPES)
def test_gated_products(float8: bool, n: int, k: int, bias: bool) -> None:
    linear = product(n, k, bias, float8=float8)
    for rows in ROWS:
        x = normal(rows, k)
        gate, up = exact(linear, x).chunk(2, -1)
        assert error(linear.gated(x), F.silu(gate) * up) < RELATIVE


@BOTH
def test_small_products(float8: bool) -> None:
    """What racecheck runs: tiles in several parts, plain and gated."""
    plain, gate_up = product(144, 528, float8=float8), product(144, 272, float8=float8)
    for rows in (3, 40):
        x, residual = normal(rows, 528), normal(rows, 144)
        assert error(plain.add(x, residual), exact(plain, x) + residual.double()) < RELATIVE
        x = normal(rows, 272)
        gate, up = exact(gate_up, x).chunk(2, -1)
        assert error(gate_up.gated(x), F.silu(gate) * up) < RELATIVE


def test_many_outputs() -> None:
    linear = product(128256, 1024)
    for rows in (1, 16, 64):
        x = normal(rows, 1024)
        assert error(linear(x), exact(linear, x)) < RELATIVE


def test_every_number_of_float8_at_every_place() -> None:
    """A row of zeros and a one reads a column of the weights."""
    codes = torch.arange(256, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = codes.bfloat16()
    numbers[numbers.isnan()] = LARGEST  # so that a row's largest is the type's, and its scale 1
    at = torch.arange(272, device="cuda")[:, None] + torch.arange(256, device="cuda")
    weight = numbers[at % 256]
    linear = make_fp8_linear(weight)
    assert torch.equal(linear.weight.bfloat16(), interleave(weight))
    ones = torch.eye(256, device="cuda").bfloat16()
    for rows in (5, 8, 16, 32, 64):
        for x in ones.split(rows):
            assert torch.equal(linear(x), x @ weight.T)


def test_float8_beyond_the_kernels_rows() -> None:
    """Goes to PyTorch, which quantises the rows too."""
    weight = normal(256, 512)
    linear, torch_own = make_fp8_linear(weight), Fp8Linear(weight)
    x, residual = normal(OWN_ROWS + 1, 512), normal(OWN_ROWS + 1, 256)
    assert torch.equal(linear(x), torch_own(x))
    assert torch.equal(linear.add(x, residual), torch_own.add(x, residual))
    assert torch.equal(linear.gated(x), torch_own.gated(x))
    assert error(torch_own(x), exact(linear, x)) > RELATIVE
    assert linear.nbytes == 256 * 512 + 256 * 4


@BOTH
def test_rows_with_a_stride(float8: bool) -> None:
    linear = product(256, 512, float8=float8)
    x = normal(16, 3 * 512)[:, 512:1024]
    residual = normal(16, 2 * 256)[:, 256:]
    assert torch.equal(linear(x), linear(x.contiguous()))
    assert torch.equal(linear.add(x, residual), linear.add(x, residual.contiguous()))


@BOTH
def test_the_same_call_gives_the_same_bits(float8: bool) -> None:
    shapes = [(4096, 4096), (512, 14336), (28672, 1024)]
    linears = [product(*shape, float8=float8) for shape in shapes]
    inputs = [normal(32, linear.weight.shape[1]) for linear in linears]
    first = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
    for _ in range(20):
        again = [linear(x) for linear, x in zip(linears, inputs, strict=True)]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@BOTH
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (1008, 14336)])
def test_a_row_alone_and_among_others(n: int, k: int, float8: bool) -> None:
    linear = product(n, k, batch_invariant=True, float8=float8)
    x, residual = normal(300, k), normal(300, n)
    whole = linear(x), linear.add(x, residual), linear.gated(x)
    for first, count in ((0, 1), (5, 3), (100, 16), (131, 70), (299, 1), (7, 128)):
        part = slice(first, first + count)
        some = linear(x[part]), linear.add(x[part], residual[part]), linear.gated(x[part])
        assert all(torch.equal(a[part], b) for a, b in zip(whole, some, strict=True))


@BOTH
def test_a_chain_of_products_captured_in_a_graph(float8: bool) -> None:
    """Each starts while the one before it still runs, and must not read its results too soon."""
    shapes = [(768, 512), (1024, 768), (512, 512)]
    layers = [[product(*shape, float8=float8) for shape in shapes] for _ in range(5)]

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
