"""float8 weights on a GPU against float64 and the CPU's reference: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from cloverinfer.attention.cuda import missing
from cloverinfer.models.cuda_kernels import DenseKernels
from cloverinfer.models.fp8 import Fp8Linear, interleave, quantise

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


@pytest.fixture(autouse=True)
def _hardware() -> None:
    if not missing() and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs compute capability 8.9")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 33, 576, 4096, 14336, 40000])
@pytest.mark.parametrize("extra", [0, 3, 16])
def test_rows_are_quantised_as_on_the_cpu(dtype: torch.dtype, columns: int, extra: int) -> None:
    torch.manual_seed(columns)
    rows = torch.randn(130, columns + extra, device="cuda").to(dtype)[:, :columns]
    rows[7] = 0
    rows[8] *= 1e-3
    quantised, scale = DenseKernels(dtype, torch.device("cuda", 0)).quantise(rows)
    expected, expected_scale = quantise(rows)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    off = (quantised.float() - expected.float()).abs()
    # Where a scale differs in its last bit, a number halfway between two may fall to the other: few
    # do, more of them where inputs are coarse, as in bfloat16.
    assert (off <= expected.float().abs() / 8 + 2**-9).all()
    assert (off > 0).float().mean() < (1e-3 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [16, 48, 4096, 14336, 40000])
@pytest.mark.parametrize("extra", [0, 3, 8])
def test_interleaved_rows(dtype: torch.dtype, columns: int, extra: int) -> None:
    torch.manual_seed(columns)
    rows = torch.randn(9, columns + extra, device="cuda").to(dtype)[:, :columns]
    kernels = DenseKernels(dtype, torch.device("cuda", 0))
    plain, scale = kernels.quantise(rows)
    quantised, same = kernels.quantise(rows, interleaved=True)
    assert torch.equal(same, scale)
    assert torch.equal(quantised.float(), interleave(plain.float()))


@pytest.mark.parametrize("shape", [(48, 64), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("tokens", [0, 1, 7, 16, 64, 300])
@pytest.mark.parametrize("biased", [False, True])
def test_products(shape: tuple[int, int], tokens: int, biased: bool) -> None:
    torch.manual_seed(tokens)
    weight = (torch.randn(shape, device="cuda") * shape[1] ** -0.5).bfloat16()
    bias = torch.randn(shape[0], device="cuda").bfloat16() if biased else None
    x = torch.randn(tokens, shape[1], device="cuda").bfloat16()
    mine = Fp8Linear(weight, bias)(x)
    assert mine.dtype == torch.bfloat16
    (x8, x_scale), (w8, w_scale) = quantise(x), quantise(weight)
    expected = (x8.double() * x_scale) @ (w8.double() * w_scale).T
    expected += 0 if bias is None else bias.double()
    assert mine.shape == expected.shape
    # The tensor cores of 9.0 add products of float8 with about 14 bits, cut off, not rounded.
    if tokens:
        assert (mine.double() - expected).norm() / expected.norm() < 1e-2


def test_a_captured_product_reads_new_rows() -> None:
    torch.manual_seed(0)
    linear = Fp8Linear(torch.randn(128, 256, device="cuda").bfloat16())
    x = torch.randn(8, 256, device="cuda").bfloat16()
    linear(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(x)
    for _ in range(5):
        x.copy_(torch.randn(8, 256))
        graph.replay()
        assert torch.equal(y, linear(x))
