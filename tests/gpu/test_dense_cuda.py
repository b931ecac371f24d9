"""The dense half's GPU kernels against float64, and its stages against the CPU's: `make test-gpu`.

Every type; widths that fill packs, that do not, and that no thread block holds at once; strides.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.dense_twin import TwinKernels

from cloverinfer.attention.base import FusedRows
from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.kvcache.layout import KVSpec, PoolLayout
from cloverinfer.models.base import QKV, ModelArch
from cloverinfer.models.cuda_kernels import DenseKernels
from cloverinfer.models.rope import rope_table
from cloverinfer.transport.base import DeviceMemory

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing()),
    pytest.mark.usefixtures("one_torch_thread"),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4},
    torch.float16: {"rtol": 2**-10, "atol": 1e-4},
}
"""Float64's result is rounded to the type, so one unit in the last place is allowed."""
WIDTHS = [1, 33, 64, 576, 4096, 5120, 8192, 14336, 40000]
ROWS = [1, 3, 32, 257]
TWIN = TwinKernels()


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def strided(rows: int, columns: int, extra: int, dtype: torch.dtype) -> torch.Tensor:
    return normal(rows, columns + extra, dtype=dtype)[:, :columns]


def kernels_of(dtype: torch.dtype) -> DenseKernels:
    return DenseKernels(dtype, torch.device("cuda", 0))


def close(mine: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(mine, expected, **CLOSE[mine.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("extra", [0, 64, 3])
def test_norms(dtype: torch.dtype, columns: int, rows: int, extra: int) -> None:
    torch.manual_seed(rows + columns)
    kernels, weight = kernels_of(dtype), normal(columns, dtype=dtype)
    hidden, added = (strided(rows, columns, extra, dtype) for _ in range(2))
    close(kernels.norm(hidden, weight, 1e-5), TWIN.norm(hidden, weight, 1e-5))
    total, mine = kernels.add_norm(hidden, added, weight, 1e-5)
    expected_total, expected = TWIN.add_norm(hidden, added, weight, 1e-5)
    assert torch.equal(total, expected_total), "the residual is not as PyTorch adds it"
    close(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
def test_embeddings(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    table, weight = normal(50, columns, dtype=dtype), normal(columns, dtype=dtype)
    ids = torch.tensor([49, 0, -1, 17, 50, 17, 2**40], device="cuda")
    embedded, mine = kernels_of(dtype).embed_norm(table, ids, weight, 1e-6)
    expected_embedded, expected = TWIN.embed_norm(table, ids, weight, 1e-6)
    assert torch.equal(embedded, expected_embedded)
    close(mine, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("extra", [0, 64, 3])
def test_gates(dtype: torch.dtype, columns: int, rows: int, extra: int) -> None:
    torch.manual_seed(rows + columns)
    gate_up = strided(rows, 2 * columns, extra, dtype) * 3
    gate_up[0, :1], gate_up[-1, -1:] = -80, 80  # the exponential at its ends
    close(kernels_of(dtype).gate(gate_up), TWIN.gate(gate_up))


def places(how: str, qkv_thd: torch.Tensor, heads: tuple[int, int, int]) -> QKV:
    """Where q, k and v are to go: where they are, or to rows of somebody else's."""
    if how == "inside":
        q, k, v = qkv_thd.split_with_sizes(heads, 1)
        return q, k, v
    tokens, dim, dtype = qkv_thd.shape[0], qkv_thd.shape[2], qkv_thd.dtype
    if how == "apart":
        q, k, v = (torch.full((tokens, n, dim), torch.nan, dtype=dtype).cuda() for n in heads)
        return q, k, v
    wide = torch.full((tokens, sum(heads) * dim + 5), torch.nan, dtype=dtype).cuda()
    parts = wide[:, 1:-4].unflatten(1, (-1, dim)).split_with_sizes(heads, 1)
    return parts[0], parts[1], parts[2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [2, 16, 36, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("heads", [(32, 8), (7, 1), (3, 3)])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("how", ["inside", "apart", "odd"])
def test_rotations(
    dtype: torch.dtype, dim: int, heads: tuple[int, int], normed: bool, how: str
) -> None:
    torch.manual_seed(dim)
    parts = (heads[0], heads[1], heads[1])
    rope = tuple(part.cuda() for part in rope_table(dim, 1e4, None, 300, dtype))
    for tokens in (1, 5, 130):
        qkv = normal(tokens, sum(parts), dim, dtype=dtype)
        norm = normal(sum(heads), dim, dtype=dtype) if normed else None
        positions = torch.randint(0, 300, (tokens,), device="cuda")
        positions[-1] = 10**6 if tokens > 1 else 299  # held to the table
        copy = qkv.clone()
        expected, mine = places(how, copy, parts), places(how, qkv, parts)
        TWIN.rotate(copy, expected, positions, rope, norm, 1e-6)  # type: ignore[arg-type]
        kernels_of(dtype).rotate(qkv, mine, positions, rope, norm, 1e-6)  # type: ignore[arg-type]
        for one, other in zip(mine, expected, strict=True):
            scale = 4 if dtype == torch.float32 else 1  # two products are added
            near = {key: scale * value for key, value in CLOSE[dtype].items()}
            near["atol"] = max(near["atol"], 8 * near["rtol"])  # where they cancel
            torch.testing.assert_close(one, other, **near)
        assert torch.equal(mine[2], expected[2]), "values are copied, not computed"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kernels, weight = kernels_of(dtype), normal(4096, dtype=dtype)
    hidden, added = normal(100, 4096, dtype=dtype), normal(100, 4096, dtype=dtype)
    together = kernels.add_norm(hidden, added, weight, 1e-5)[1]
    gates = kernels.gate(hidden)
    for row in (0, 57, 99):
        at = slice(row, row + 1)
        assert torch.equal(kernels.add_norm(hidden[at], added[at], weight, 1e-5)[1], together[at])
        assert torch.equal(kernels.gate(hidden[at]), gates[at])


def test_no_rows() -> None:
    kernels, weight = kernels_of(torch.bfloat16), normal(64, dtype=torch.bfloat16)
    empty = normal(0, 64, dtype=torch.bfloat16)
    assert kernels.norm(empty, weight, 1e-5).shape == (0, 64)
    assert kernels.add_norm(empty, empty, weight, 1e-5)[0].shape == (0, 64)
    assert kernels.gate(empty).shape == (0, 32)


POOLS = {
    torch.float32: ["float32"],
    torch.bfloat16: ["bfloat16", "float8_e4m3"],
    torch.float16: ["float16", "float8_e4m3"],
}


@pytest.mark.parametrize(
    ("dtype", "stored"), [(dtype, stored) for dtype in DTYPES for stored in POOLS[dtype]]
)
@pytest.mark.parametrize("dim", [16, 36, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_into_the_pool(dtype: torch.dtype, stored: str, dim: int, normed: bool) -> None:
    """To the bit what rotating and then appending leaves there."""
    torch.manual_seed(dim)
    tokens, heads, kv_heads = 37, 6, 2
    scales = {"k_scale": 0.02, "v_scale": 0.03} if stored == "float8_e4m3" else {}
    spec = KVSpec(kv_heads=kv_heads, k_dim=dim, v_dim=dim, dtype=stored, scale=1.0, **scales)
    layout = PoolLayout((spec, spec), 16, 8)
    slots = torch.randperm(128, device="cuda")[:tokens]
    slots[5] = -1
    cos, sin = (part.cuda() for part in rope_table(dim, 1e4, None, 300, dtype))
    positions = torch.randint(0, 300, (tokens,), device="cuda")
    norm = normal(heads + kv_heads, dim, dtype=dtype) if normed else None
    qkv = normal(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    pools, queries = [], []
    for fused in (False, True):
        pool = torch.zeros(layout.total_bytes, dtype=torch.uint8, device="cuda")
        backend = CudaAttention()
        backend.allocate(layout, heads, DeviceMemory(pool.data_ptr(), layout.total_bytes, 0))
        rows = FusedRows(qkv.clone(), kv_heads, positions, (cos, sin), norm, 1e-6)
        q, k, v = rows.parts
        if fused:
            assert backend.append_rotated(1, rows, slots).data_ptr() == q.data_ptr()
        else:
            kernels = kernels_of(dtype)
            kernels.rotate(rows.qkv_thd, (q, k, v), positions, (cos, sin), norm, 1e-6)
            backend.append(1, k, v, slots)
        queries.append(q)
        pools.append(pool)
        torch.cuda.synchronize()
        backend.close()
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(pools[0], pools[1])
    assert pools[0].any()


@pytest.mark.parametrize(
    ("dtype", "stored"), [(dtype, stored) for dtype in DTYPES for stored in POOLS[dtype]]
)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("count", [1, 3, 20])
def test_attending_right_after_a_rotation_appended(
    dtype: torch.dtype, stored: str, dim: int, count: int
) -> None:
    """To the bit what attending later gives: no key is read before it is appended, where its place
    holds NaN."""
    torch.manual_seed(dim)
    lengths = [1, 15, 16, 17, 31, 32, 33, 48, 49, 300, 1000]
    counts = [min(count, length) for length in lengths]
    heads, kv_heads, size = 8, 2, 16
    spec = KVSpec(kv_heads=kv_heads, k_dim=dim, v_dim=dim, dtype=stored, scale=0.1)
    blocks = [-(-length // size) for length in lengths]
    layout = PoolLayout((spec,), size, sum(blocks))
    pool = torch.zeros(layout.total_bytes, dtype=torch.uint8, device="cuda")
    backend = CudaAttention()
    backend.allocate(layout, heads, DeviceMemory(pool.data_ptr(), layout.total_bytes, 0))
    places = torch.randperm(sum(blocks))
    tables = torch.full((len(lengths), max(blocks)), -1, dtype=torch.int32)
    slots, older = [], []
    for row, (length, n) in enumerate(zip(lengths, counts, strict=True)):
        mine, places = places[: blocks[row]], places[blocks[row] :]
        tables[row, : len(mine)] = mine
        at = torch.arange(length)
        held = mine[at // size] * size + at % size
        slots.append(held[length - n :])
        older.append(held[: length - n])
    own, before = torch.cat(slots).cuda(), torch.cat(older).cuda()
    k, v = (normal(len(before), kv_heads, dim, dtype=dtype) for _ in range(2))
    backend.append(0, k, v, before)
    starts = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    rest = starts, tables.cuda(), torch.tensor(lengths).int().cuda()
    cos, sin = (part.cuda() for part in rope_table(dim, 1e4, None, 1000, dtype))
    positions = torch.cat(
        [torch.arange(m - n, m) for m, n in zip(lengths, counts, strict=True)]
    ).cuda()
    spoilt = torch.full((len(own), kv_heads, dim), torch.nan, dtype=dtype, device="cuda")
    for _ in range(10):
        qkv = normal(len(own), heads + 2 * kv_heads, dim, dtype=dtype)
        backend.append(0, spoilt, spoilt, own)
        torch.cuda.synchronize()
        fused = FusedRows(qkv, kv_heads, positions, (cos, sin), None, 1e-6)
        q = backend.append_rotated(0, fused, own)
        o, lse = backend.attend(0, q, *rest)
        torch.cuda.synchronize()
        later_o, later_lse = backend.attend(0, q, *rest)
        assert o.isfinite().all()
        assert torch.equal(o, later_o)
        assert torch.equal(lse, later_lse)
    backend.close()


def arch_of(family: str, **sizes: Any) -> ModelArch:
    shape = {
        "num_layers": 4,
        "hidden_size": 256,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "intermediate_size": 640,
        "vocab_size": 1000,
        "max_position": 512,
    }
    return ModelArch(family=family, attention_bias=family == "qwen2", **(shape | sizes))


def run_stages(half: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Logits, with values in the place of attention's output."""
    carry = attended = None
    for i in range(half.num_layers + 1):
        q, _, v, carry = half.stage(i, attended, carry, ids, positions)
        if q is not None:
            attended = v.repeat_interleave(q.shape[1] // v.shape[1], 1) + q
    return half.logits(carry)


def make_halves(family: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Of the same weights: on the GPU in ``dtype``, on the CPU in float32."""
    from cloverinfer.models.registry import create_half
    from cloverinfer.models.weights import Checkpoint, DummySource

    class Shared(DummySource):
        """Rounded to the type, and with norms that are not one."""

        def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
            tensor = super().load(name, shape)
            if "norm" in name:
                tensor = 1 + 0.3 * super().load(name.replace("norm", "n"), (*shape, 1))[..., 0]
            return tensor.to(dtype)

    arch = arch_of(family)
    mine = create_half(arch, Checkpoint(Shared(0), dtype, device=torch.device("cuda", 0)), 512)
    other = create_half(arch, Checkpoint(Shared(0), torch.float32), 512)
    return mine, other


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stages_of_every_family(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    mine, other = make_halves(family, dtype)
    for tokens in (1, 7, 64):
        ids, positions = torch.randint(1000, (tokens,)), torch.randint(512, (tokens,))
        logits = run_stages(mine, ids.cuda(), positions.cuda()).cpu()
        expected = run_stages(other, ids, positions)
        error = (logits - expected).norm() / expected.norm()
        # A rounding of each stage's values; float32 products are cuBLAS's in full precision.
        most = {torch.float32: 2e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
        assert error <= most, float(error)


def test_captured_stages_give_the_same_bits() -> None:
    """Kernels that begin before the last one ends read nothing too early."""
    torch.manual_seed(0)
    mine, _ = make_halves("qwen3", torch.bfloat16)
    ids, positions = (torch.randint(500, (9,), device="cuda") for _ in range(2))
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_stages(mine, ids, positions)
    with torch.cuda.graph(graph, stream=stream):
        logits = run_stages(mine, ids, positions)
    for _ in range(50):
        ids.copy_(torch.randint(500, (9,)))
        positions.copy_(torch.randint(500, (9,)))
        graph.replay()
        assert torch.equal(logits, run_stages(mine, ids, positions))
