"""The contract of attention backends, held to by every one against a dense float64 reference.

Pools start full of NaN, block tables are shuffled, and entries past a row's length name no block
at all: whatever a backend reads without leave shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
import torch

from cloverinfer.attention import AttentionBackend, backend_names, create_backend
from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.attention.null import AppendCall, AttendCall, NullAttention
from cloverinfer.attention.pool import DTYPES, STORED, Pool
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for
from cloverinfer.transport.base import DeviceMemory

ON_GPU = pytest.mark.skipif(bool(missing()), reason=missing())
CUDA = pytest.param("cuda", marks=ON_GPU)
SMALLER = {"cuda-163k": 163 << 10, "cuda-99k": 99 << 10, "cuda-plain": 1}
"""The cuda backend as on devices with less shared memory for a thread block."""
ON_HOST = ["torch", "cpu"]
COMPUTING = [*ON_HOST, CUDA, *(pytest.param(name, marks=ON_GPU) for name in SMALLER)]
EVERY = [CUDA if name == "cuda" else name for name in backend_names()]
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Of ``o``, absolute, for values of about unit size. ``lse`` must be within that in float32 and
within a fifth of it in 16 bits, relative to its size where that is above 1."""
UNNAMED = -(2**31)
"""Stands in block tables past a row's length."""
NAN_BYTES = 0xFF
"""All bits set is NaN in float32, bfloat16 and float16."""


@pytest.fixture(autouse=True)
def _clean(one_torch_thread: None) -> Iterator[None]:
    yield
    _ON_DEVICE.clear()


@dataclass
class Case:
    """Rows of one call, and what the cache holds for them."""

    spec: KVSpec
    heads: int
    block_size: int
    counts: list[int]
    lengths: list[int]

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(sum(self.lengths) + self.spec.k_dim)
        dtype = DTYPES[self.spec.dtype]
        spec, total = self.spec, sum(self.lengths)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        self.q_thd = normal(sum(self.counts), self.heads, spec.k_dim)
        self.k_tnd = normal(total, spec.kv_heads, spec.k_dim)
        self.v_tne = normal(total, spec.kv_heads, spec.v_dim)
        needed = [blocks_for(length, self.block_size) for length in self.lengths]
        self.num_blocks = sum(needed) + 3
        shuffled = torch.randperm(self.num_blocks, generator=random).tolist()
        self.tables = torch.full((len(needed), max(needed) + 1), UNNAMED, dtype=torch.int32)
        self.blocks: list[int] = []
        slots: list[int] = []
        for row, count in enumerate(needed):
            mine, shuffled = shuffled[:count], shuffled[count:]
            self.tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            self.blocks += mine
            at = range(self.lengths[row])
            slots += [
                mine[p // self.block_size] * self.block_size + p % self.block_size for p in at
            ]
        self.slots = torch.tensor(slots)
        self.starts = torch.tensor([0, *self.counts]).cumsum(0).to(torch.int32)
        self.lengths_r = torch.tensor(self.lengths, dtype=torch.int32)

    @property
    def layout(self) -> PoolLayout:
        return PoolLayout((self.spec,), self.block_size, self.num_blocks)

    def move(self, backend: AttentionBackend) -> None:
        for name in ("q_thd", "k_tnd", "v_tne", "tables", "slots", "starts", "lengths_r"):
            setattr(self, name, getattr(self, name).to(backend.capabilities.device))

    def fill(self, backend: AttentionBackend, layer: int = 0) -> None:
        self.move(backend)
        backend.append(layer, self.k_tnd, self.v_tne, self.slots)

    def attend(self, backend: AttentionBackend) -> tuple[torch.Tensor, torch.Tensor]:
        return backend.attend(0, self.q_thd, self.starts, self.tables, self.lengths_r)


def dense(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention written out in float64, one query token and head at a time; o and lse."""
    spec, group = case.spec, case.heads // case.spec.kv_heads
    outs, lses = [], []
    ends = torch.tensor(case.lengths).cumsum(0).tolist()
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        at = slice(ends[row] - length, ends[row])
        k_hld = case.k_tnd[at].cpu().double().transpose(0, 1).repeat_interleave(group, 0)
        v_hle = case.v_tne[at].cpu().double().transpose(0, 1).repeat_interleave(group, 0)
        for i in range(count):
            position = length - count + i
            seen = torch.arange(length)
            distance = position - seen
            scores = (k_hld @ case.q_thd[int(case.starts[row]) + i].cpu().double()[..., None])[
                ..., 0
            ]
            scores *= spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            if spec.alibi_slopes is not None:
                scores -= torch.tensor(spec.alibi_slopes).double()[:, None] * distance
            seen = (distance >= 0) & (distance < (spec.window or length))
            scores[:, ~seen] = -math.inf
            logits = scores
            if spec.sinks is not None:
                logits = torch.cat([scores, torch.tensor(spec.sinks).double()[:, None]], 1)
            lse = logits.logsumexp(1)
            outs.append(((scores - lse[:, None]).exp()[:, None] @ v_hle)[:, 0])
            lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


def make_spec(kv_heads: int = 2, dim: int = 64, dtype: str = "float32", **fields: object) -> KVSpec:
    sizes = {"k_dim": dim, "v_dim": dim, **fields}
    return KVSpec(kv_heads=kv_heads, dtype=dtype, scale=dim**-0.5, **sizes)  # type: ignore[arg-type]


def poisoned(layout: PoolLayout) -> memoryview:
    memory = torch.full((layout.total_bytes + 4096,), NAN_BYTES, dtype=torch.uint8)
    skip = -memory.data_ptr() % 4096
    return memoryview(memory.numpy())[skip : skip + layout.total_bytes]


_ON_DEVICE: list[torch.Tensor] = []
"""Pools of device memory, whose owners we are."""


def poisoned_on_device(layout: PoolLayout) -> DeviceMemory:
    memory = torch.full((layout.total_bytes,), NAN_BYTES, dtype=torch.uint8, device="cuda")
    _ON_DEVICE.append(memory)
    return DeviceMemory(memory.data_ptr(), memory.numel(), torch.cuda.current_device())


def created(name: str, threads: int) -> AttentionBackend:
    if name in SMALLER:
        return CudaAttention(shared_limit=SMALLER[name])
    return create_backend(name, threads)


def opened(
    name: str, layout: PoolLayout, heads: int, threads: int = 2, buffer: memoryview | None = None
) -> AttentionBackend:
    backend = created(name, threads)
    if backend.capabilities.device == "cuda":
        backend.allocate(layout, heads, poisoned_on_device(layout))
    else:
        backend.allocate(layout, heads, poisoned(layout) if buffer is None else buffer)
    return backend


def check(name: str, case: Case, threads: int = 2) -> None:
    backend = opened(name, case.layout, case.heads, threads)
    case.fill(backend)
    o, lse = case.attend(backend)
    expected_o, expected_lse = dense(case)
    close_to(o, expected_o, case.spec.dtype)
    assert lse.dtype == torch.float32
    error = (lse.cpu().double() - expected_lse).abs() / expected_lse.abs().clamp(min=1)
    assert error.max() <= lse_tolerance(case.spec.dtype)
    again_o, again_lse = case.attend(backend)
    assert torch.equal(o, again_o), "the same call gave other bits"
    assert torch.equal(lse, again_lse)
    backend.close()
    backend.close()


def close_to(o: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    assert o.dtype == DTYPES[dtype]
    assert o.shape == expected.shape
    assert (o.cpu().double() - expected).abs().max() <= TOLERANCE[dtype]


def lse_tolerance(dtype: str) -> float:
    return 2e-5 if dtype == "float32" else TOLERANCE[dtype] / 5


RAGGED = [1, 2, 31, 32, 33, 64, 127, 300, 511, 700]
FEATURES = {
    "window": {"window": 37},
    "window-1": {"window": 1},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0, 4.0, -3.0)},
    "alibi": {"alibi_slopes": (0.5, 0.25, 0.125, 0.0625, 0.03, 0.01)},
    "all": {
        "window": 50,
        "softcap": 3.0,
        "sinks": (0.5, -1.0, 2.0, 0.0, 4.0, -3.0),
        "alibi_slopes": (0.5, 0.25, 0.125, 0.0625, 0.03, 0.01),
    },
}


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_decode_of_ragged_rows(name: str, dtype: str, block_size: int) -> None:
    check(name, Case(make_spec(3, 64, dtype), 9, block_size, [1] * len(RAGGED), RAGGED))


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("dim", [16, 24, 64, 80, 96, 128])
def test_head_sizes_and_groups(name: str, dtype: str, group: int, dim: int) -> None:
    check(name, Case(make_spec(2, dim, dtype), 2 * group, 16, [1, 1, 1], [5, 77, 130]))


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("block_size", [1, 4, 256])
def test_small_and_large_blocks(name: str, block_size: int) -> None:
    check(name, Case(make_spec(2, 16), 4, block_size, [1, 2, 20], [3, 70, 300]))


@pytest.mark.parametrize("name", COMPUTING)
def test_values_of_another_size_than_keys(name: str) -> None:
    check(name, Case(make_spec(2, 48, v_dim=16), 6, 16, [1, 3, 40], [9, 70, 100]))


def stored_as(case: Case, stored: str) -> Case:
    """The same calls over a pool of another type, and keys and values as it gives them back."""
    case.spec = msgspec.structs.replace(case.spec, dtype=stored)
    return case


def as_held(case: Case, backend: AttentionBackend) -> None:
    """Takes keys and values from the pool, as it stores them: how ties of int8 round is free."""
    pool = Pool(case.layout)
    pool.import_blocks(
        list(range(case.num_blocks)), backend.export_blocks(list(range(case.num_blocks)))
    )
    rows = [pool.gather(0, case.tables[i], 0, n) for i, n in enumerate(case.lengths)]
    case.k_tnd, case.v_tne = (torch.cat([row[i].transpose(0, 1) for row in rows]) for i in (0, 1))


@pytest.mark.parametrize("name", ON_HOST)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (80, 8), (128, 4), (256, 1)])
def test_pools_of_another_type_than_the_tokens(
    name: str, stored: str, dtype: str, dim: int, group: int
) -> None:
    """Exact but for what storing rounds: the reference attends over what the pool holds."""
    assert create_backend(name).capabilities.converts
    case = Case(make_spec(2, dim, dtype), 2 * group, 16, [1, 9, 1, 30], [77, 9, 300, 100])
    backend = opened(name, stored_as(case, stored).layout, case.heads)
    case.fill(backend)
    o, lse = case.attend(backend)
    given = case.v_tne.double()
    as_held(case, backend)
    assert (case.v_tne.double() - given).abs().max() <= 0.05, "other tokens were stored"
    expected_o, expected_lse = dense(case)
    close_to(o, expected_o, dtype)
    assert (lse.double() - expected_lse).abs().max() <= 2 * lse_tolerance(dtype)


@pytest.mark.parametrize("name", ON_HOST)
def test_int8_is_within_half_a_step_of_each_token_and_head(name: str) -> None:
    """Tokens of very different sizes: each keeps its own scale, and one token gives itself back."""
    case = Case(make_spec(2, 64), 6, 16, [1] * 5, [1] * 5)
    sizes = torch.tensor([0.0, 1e-4, 1.0, 300.0, 1e6])
    case.v_tne *= sizes[:, None, None]
    backend = opened(name, stored_as(case, "int8").layout, case.heads)
    case.fill(backend)
    o, _ = case.attend(backend)
    given = case.v_tne.repeat_interleave(3, 1)
    step = given.abs().amax(-1, keepdim=True) / 127
    assert ((o - given).abs() <= step * 0.5001).all()
    assert (o - given).abs().max() > 1, "the largest are not stored as they were"


@pytest.mark.parametrize("source", ON_HOST)
@pytest.mark.parametrize("target", ON_HOST)
def test_int8_blocks_export_with_their_scales(source: str, target: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1, 1, 30], [40, 50, 60])
    layout = stored_as(case, "int8").layout
    assert layout.block_bytes == 2 * 16 * (2 * 16 + 2 * 4)
    one, other = opened(source, layout, 4), opened(target, layout, 4)
    case.fill(one)
    data = one.export_blocks(case.blocks)
    other.import_blocks(case.blocks, data)
    assert torch.equal(other.export_blocks(case.blocks), data)
    close_to(case.attend(other)[0], case.attend(one)[0].double(), "float32")


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("feature", list(FEATURES))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_features(name: str, feature: str, dtype: str) -> None:
    spec = make_spec(2, 32, dtype, **FEATURES[feature])
    check(name, Case(spec, 6, 16, [1, 1, 4, 1, 45, 60], [1, 36, 37, 300, 45, 200]))


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_decode_prompt_and_chunk_rows_in_one_call(name: str, dtype: str) -> None:
    counts = [1, 64, 1, 33, 2, 8, 9, 1]
    lengths = [100, 64, 1, 200, 2, 300, 9, 513]
    check(name, Case(make_spec(3, 64, dtype), 9, 32, counts, lengths))


@pytest.mark.parametrize("name", COMPUTING)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_long_row(name: str, threads: int) -> None:
    check(name, Case(make_spec(1, 64), 4, 32, [1], [3001]), threads)


@pytest.mark.parametrize("name", COMPUTING)
def test_scores_far_apart(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1, 20], [90, 100])
    case.q_thd *= 40
    check(name, case)


@pytest.mark.parametrize("name", COMPUTING)
def test_strided_tokens(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1, 20], [90, 100])
    fused = torch.cat([case.k_tnd.flatten(1), case.v_tne.flatten(1)], 1)
    case.k_tnd = fused[:, :32].unflatten(1, (2, 16))
    case.v_tne = fused[:, 32:].unflatten(1, (2, 16))
    case.q_thd = torch.cat([case.q_thd, case.q_thd], 1)[:, :4]
    check(name, case)


@pytest.mark.parametrize("name", COMPUTING)
def test_append_again_replaces(name: str) -> None:
    case = Case(make_spec(2, 16, "bfloat16"), 4, 16, [1, 1], [40, 50])
    backend = opened(name, case.layout, 4)
    case.move(backend)
    backend.append(0, case.k_tnd * 2, case.v_tne * 3, case.slots)
    case.fill(backend)
    first = case.attend(backend)
    case.fill(backend)
    second = case.attend(backend)
    assert torch.equal(first[0], second[0])
    close_to(second[0], dense(case)[0], "bfloat16")


@pytest.mark.parametrize("name", COMPUTING)
def test_layers_are_apart(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1], [40])
    specs = (make_spec(1, 32, "bfloat16"), case.spec, make_spec(4, 8))
    layout = PoolLayout(specs, 16, case.num_blocks)
    backend = opened(name, layout, 4)
    case.fill(backend, layer=1)
    wide = torch.ones(40, 1, 32, dtype=torch.bfloat16).to(backend.capabilities.device)
    backend.append(0, wide, wide, case.slots)
    small = torch.ones(40, 4, 8).to(backend.capabilities.device)
    backend.append(2, small, small, case.slots)
    o, _ = backend.attend(1, case.q_thd, case.starts, case.tables, case.lengths_r)
    close_to(o, dense(case)[0], "float32")


@pytest.mark.parametrize("name", COMPUTING)
def test_halves_of_the_context_merge_to_the_whole(name: str) -> None:
    case = Case(make_spec(2, 64), 8, 32, [1], [500])
    backend = opened(name, case.layout, 8)
    case.fill(backend)
    o, lse = case.attend(backend)
    cut = 256
    parts = []
    for table, length in ((case.tables[:, :8], cut), (case.tables[:, 8:], 500 - cut)):
        lengths = torch.tensor([length], dtype=torch.int32).to(lse.device)
        parts.append(backend.attend(0, case.q_thd, case.starts, table.contiguous(), lengths))
    merged_lse = torch.logaddexp(parts[0][1], parts[1][1])
    merged = sum(part_o * (part_lse - merged_lse).exp()[..., None] for part_o, part_lse in parts)
    assert torch.allclose(merged_lse, lse, atol=1e-5)
    assert torch.allclose(merged, o, atol=1e-5)


@pytest.mark.parametrize("source", COMPUTING)
@pytest.mark.parametrize("target", COMPUTING)
def test_exported_blocks_import_elsewhere(source: str, target: str) -> None:
    case = Case(make_spec(2, 16, "float16"), 4, 16, [1, 1, 30], [40, 50, 60])
    specs = (case.spec, make_spec(1, 32))
    layout = PoolLayout(specs, 16, case.num_blocks)
    one, other = opened(source, layout, 4), opened(target, layout, 4)
    case.fill(one)
    data = one.export_blocks(case.blocks)
    assert data.dtype == torch.uint8
    assert data.shape == (layout.block_bytes * len(case.blocks),)
    moved = case.blocks[1:] + case.blocks[:1]
    other.import_blocks(moved, data.to(other.capabilities.device))
    renamed = dict(zip(case.blocks, moved, strict=True)) | {UNNAMED: UNNAMED}
    case.tables = case.tables.cpu().apply_(renamed.__getitem__)
    case.move(other)
    o, _ = case.attend(other)
    close_to(o, dense(case)[0], "float16")
    assert torch.equal(other.export_blocks(moved).cpu(), data.cpu())


@pytest.mark.parametrize("name", COMPUTING)
def test_blocks_are_canonical_in_the_given_buffer(name: str) -> None:
    """Keys [kv_heads, block_size, k_dim], then values [kv_heads, block_size, v_dim]."""
    layout = PoolLayout((make_spec(2, 8), make_spec(2, 8, v_dim=16)), 4, 3)
    buffer = poisoned(layout)
    backend = opened(name, layout, 2, buffer=buffer)
    k, v = torch.randn(1, 2, 8), torch.randn(1, 2, 16)
    slots, device = torch.tensor([2 * 4 + 3]), backend.capabilities.device
    backend.append(1, k.to(device), v.to(device), slots.to(device))
    block = layout.layer_offsets[1] + 2 * layout.layer_block_bytes(1)
    memory = (
        _ON_DEVICE[-1].cpu() if device == "cuda" else torch.frombuffer(buffer, dtype=torch.uint8)
    )
    floats = memory.view(torch.float32)[block // 4 :][: 2 * 4 * 24]
    keys, values = floats[:64].view(2, 4, 8), floats[64:].view(2, 4, 16)
    assert torch.equal(keys[:, 3], k[0])
    assert torch.equal(values[:, 3], v[0])
    assert int(torch.isnan(floats).sum()) == floats.numel() - 2 * 24


@pytest.mark.parametrize("name", COMPUTING)
def test_own_memory(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1, 20], [90, 100])
    backend = created(name, 1)
    backend.allocate(case.layout, 4)
    case.fill(backend)
    close_to(case.attend(backend)[0], dense(case)[0], "float32")


@pytest.mark.parametrize("name", backend_names())
@pytest.mark.parametrize(
    ("spec", "heads", "field"),
    [
        (make_spec(2, 16, "float64"), 4, r"specs\[1\].dtype"),
        (make_spec(2, 16), 5, "num_heads"),
        (make_spec(0, 16), 4, r"specs\[1\].kv_heads"),
        (make_spec(2, 16, v_dim=0), 4, r"specs\[1\].v_dim"),
        (make_spec(2, 16, window=0), 4, r"specs\[1\].window"),
        (make_spec(2, 16, softcap=-1.0), 4, r"specs\[1\].softcap"),
        (make_spec(2, 16, sinks=(1.0,)), 4, r"specs\[1\].sinks"),
        (make_spec(2, 16, alibi_slopes=(1.0,)), 4, r"specs\[1\].alibi_slopes"),
    ],
)
def test_allocate_names_what_it_refuses(name: str, spec: KVSpec, heads: int, field: str) -> None:
    layout = PoolLayout((make_spec(1, 16), spec), 16, 2)
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        create_backend(name).allocate(layout, heads)


def test_cpu_refuses_odd_head_sizes() -> None:
    with pytest.raises(ConfigError, match=r"specs\[0\].v_dim must be a multiple of 8"):
        create_backend("cpu").allocate(PoolLayout((make_spec(v_dim=12),), 16, 2), 4)


@pytest.mark.parametrize("name", ON_HOST)
def test_allocate_refuses_bad_buffers(name: str) -> None:
    layout = PoolLayout((make_spec(),), 16, 2)
    with pytest.raises(ConfigError, match="at least"):
        create_backend(name).allocate(layout, 4, poisoned(layout)[:-1])
    with pytest.raises(ConfigError, match="writable"):
        create_backend(name).allocate(layout, 4, memoryview(bytes(layout.total_bytes)))
    memory = memoryview(torch.zeros(layout.total_bytes + 128, dtype=torch.uint8).numpy())
    with pytest.raises(ConfigError, match="aligned"):
        create_backend(name).allocate(layout, 4, memory[1:])


def test_unknown_backend_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="torch, cpu, cuda, null"):
        create_backend("gpu")


@pytest.mark.parametrize("name", EVERY)
def test_import_refuses_another_size(name: str) -> None:
    layout = PoolLayout((make_spec(),), 16, 4)
    backend = opened(name, layout, 4)
    with pytest.raises(ValueError, match="2 blocks are"):
        backend.import_blocks([0, 1], torch.zeros(layout.block_bytes, dtype=torch.uint8))


@pytest.mark.parametrize("name", ON_HOST)
def test_what_is_outside_the_pool_is_refused(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1], [40])
    backend = opened(name, case.layout, 4)
    end = case.num_blocks * 16
    for slot in (-1, end):
        with pytest.raises(ValueError, match="slot"):
            backend.append(0, case.k_tnd[:1], case.v_tne[:1], torch.tensor([slot]))
    for block in (-1, case.num_blocks):
        with pytest.raises(ValueError, match="block"):
            backend.export_blocks([block])
        tables = case.tables.clone()
        tables[0, 1] = block
        with pytest.raises(ValueError, match="block"):
            backend.attend(0, case.q_thd, case.starts, tables, case.lengths_r)


@pytest.mark.parametrize("name", [CUDA])
def test_what_is_outside_the_pool_is_an_error_of_the_next_call(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1], [40])
    backend = opened(name, case.layout, 4)
    case.fill(backend)
    o, _ = case.attend(backend)
    backend.append(0, case.k_tnd[:1], case.v_tne[:1], case.slots[:1] * 0 - 1)  # goes nowhere
    torch.cuda.synchronize()
    assert torch.equal(case.attend(backend)[0], o)
    for slot in (-2, case.num_blocks * 16):
        backend.append(0, case.k_tnd[:1], case.v_tne[:1], case.slots[:1] * 0 + slot)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="slot outside"):
            case.attend(backend)
    for block in (-1, case.num_blocks):
        with pytest.raises(ValueError, match="block"):
            backend.export_blocks([block])
        tables = case.tables.clone()
        tables[0, 1] = block
        backend.attend(0, case.q_thd, case.starts, tables, case.lengths_r)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="block outside"):
            case.attend(backend)
    assert torch.equal(case.attend(backend)[0], o)


@pytest.mark.parametrize("name", COMPUTING)
def test_tokens_of_another_type_or_shape_are_refused(name: str) -> None:
    case = Case(make_spec(2, 16), 4, 16, [1], [40])
    backend = opened(name, case.layout, 4)
    case.fill(backend)
    with pytest.raises(ValueError, match="k must be"):
        backend.append(0, case.k_tnd.double(), case.v_tne, case.slots)
    with pytest.raises(ValueError, match="v must be"):
        backend.append(0, case.k_tnd, case.v_tne[:, :1], case.slots)
    with pytest.raises(ValueError, match="contiguous"):
        backend.append(0, case.k_tnd.mT.contiguous().mT, case.v_tne, case.slots)
    with pytest.raises(ValueError, match="q must be"):
        backend.attend(0, case.q_thd.double(), case.starts, case.tables, case.lengths_r)


def test_null_records_and_gives_zeros() -> None:
    case = Case(make_spec(2, 16, "bfloat16", v_dim=8), 4, 16, [1, 2], [4, 5])
    backend = NullAttention()
    backend.allocate(case.layout, 4)
    case.fill(backend)
    o, lse = case.attend(backend)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o.float(), torch.zeros(3, 4, 8))
    assert torch.equal(lse, torch.zeros(3, 4))
    tables = tuple(tuple(row) for row in case.tables.tolist())
    assert backend.calls == [
        AppendCall(0, tuple(case.slots.tolist())),
        AttendCall(0, (0, 1, 3), tables, (4, 5)),
    ]
    assert backend.export_blocks([0, 1]).shape == (2 * case.layout.block_bytes,)
    assert not backend.capabilities.computes
