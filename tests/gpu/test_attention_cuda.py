"""The CUDA attention kernels on a GPU against a float64 reference: `make test-gpu`.

Pools start full of NaN, blocks are shuffled and entries past a row's length name no block. What
every backend must do is in tests/contract; here are the kernels' own dimensions: every type, head
size, block size and group, long and ragged rows, graphs, fixed splits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.attention.prompts import find_prompt_attention, sdpa
from cloverinfer.attention.prompts.base import STORED, PromptAttention
from cloverinfer.core.errors import ConfigError
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for
from cloverinfer.transport.base import DeviceMemory

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

RAGGED = [1, 2, 15, 16, 17, 31, 33, 64, 127, 300, 511, 700]
RELATIVE = {torch.bfloat16: 6e-3, torch.float16: 1.5e-3, torch.float32: 1e-5}
"""Of ||o - reference|| over ||reference||, by q's type."""


@dataclass
class Rows:
    """Rows of one call, with their cache in a pool of a backend's."""

    spec: KVSpec
    heads: int
    block_size: int
    lengths: list[int]
    counts: list[int] = field(default_factory=list)
    wide: torch.dtype = torch.bfloat16
    batch_invariant: bool = False
    prompt_attention: str = "auto"

    def __post_init__(self) -> None:
        self.counts = self.counts or [1] * len(self.lengths)
        needed = [blocks_for(length, self.block_size) for length in self.lengths]
        layout = PoolLayout((self.spec,), self.block_size, sum(needed) + 3)
        self.memory = torch.full((layout.total_bytes,), 0xFF, dtype=torch.uint8, device="cuda")
        self.backend = CudaAttention(
            batch_invariant=self.batch_invariant, prompt_attention=self.prompt_attention
        )
        self.backend.allocate(
            layout, self.heads, DeviceMemory(self.memory.data_ptr(), layout.total_bytes, 0)
        )
        stored = STORED[self.spec.dtype]
        self.dtype = self.wide if stored == torch.float8_e4m3fn else stored
        self.starts = torch.tensor([0, *self.counts]).cumsum(0).to(torch.int32).cuda()
        self.lengths_r = torch.tensor(self.lengths, dtype=torch.int32).cuda()
        self.q_thd = self.normal(sum(self.counts), self.heads, self.spec.k_dim)
        self.tables = torch.full((len(needed), max(needed) + 1), -(2**31), dtype=torch.int32)
        free = torch.randperm(layout.num_blocks).to(torch.int32)
        self.kv = []
        for row, count in enumerate(needed):
            mine, free = free[:count], free[count:]
            self.tables[row, :count] = mine
            self.kv.append(self.fill(mine.long(), self.lengths[row]))
        self.tables = self.tables.cuda()

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(self.dtype)

    def fill(self, blocks: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends a row's tokens; what the cache then stands for, in float64."""
        spec, at = self.spec, torch.arange(length)
        k_tnd = self.normal(length, spec.kv_heads, spec.k_dim)
        v_tne = self.normal(length, spec.kv_heads, spec.v_dim)
        slots = blocks[at // self.block_size] * self.block_size + at % self.block_size
        self.backend.append(0, k_tnd, v_tne, slots.cuda())
        if STORED[spec.dtype] != torch.float8_e4m3fn:
            return k_tnd.double(), v_tne.double()
        return self.rounded(k_tnd, spec.k_scale), self.rounded(v_tne, spec.v_scale)

    def rounded(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """What float8 makes of ``x``; the kernels multiply by the scale's inverse too."""
        inverse = (1 / torch.tensor(scale)).cuda()
        return (x.float() * inverse).to(torch.float8_e4m3fn).double() * scale

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.backend.attend(0, self.q_thd, self.starts, self.tables, self.lengths_r)

    def reference(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = int(self.starts[row])
        q_chd = self.q_thd[start : start + self.counts[row]].double()
        k_lhd, v_lhe = (
            x.repeat_interleave(self.heads // self.spec.kv_heads, 1) for x in self.kv[row]
        )
        return dense(self.spec, q_chd, k_lhd, v_lhe)

    def check(self) -> None:
        o, lse = self.attend()
        again_o, again_lse = self.attend()
        assert torch.equal(o, again_o), "the same call gave other bits"
        assert torch.equal(lse, again_lse)
        for row, count in enumerate(self.counts):
            expected_o, expected_lse = self.reference(row)
            start = int(self.starts[row])
            at = slice(start, start + count)
            error = (o[at].double() - expected_o).norm() / expected_o.norm()
            assert error <= RELATIVE[self.dtype] * 2, (row, float(error))
            error = (lse[at].double() - expected_lse).abs() / expected_lse.abs().clamp(min=1)
            assert error.max() <= (2e-5 if self.dtype == torch.float32 else 2e-3)
        self.backend.close()


def dense(
    spec: KVSpec, q_chd: torch.Tensor, k_lhd: torch.Tensor, v_lhe: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    count, length = q_chd.shape[0], k_lhd.shape[0]
    scores_chl = torch.einsum("chd,lhd->chl", q_chd, k_lhd) * spec.scale
    if spec.softcap is not None:
        scores_chl = spec.softcap * torch.tanh(scores_chl / spec.softcap)
    at_c = torch.arange(length - count, length, device="cuda")
    distance_cl = at_c[:, None] - torch.arange(length, device="cuda")
    if spec.alibi_slopes is not None:
        slopes_h = torch.tensor(spec.alibi_slopes, device="cuda", dtype=torch.float64)
        scores_chl = scores_chl - slopes_h[:, None] * distance_cl[:, None]
    hidden_cl = (distance_cl < 0) | (distance_cl >= (spec.window or length))
    scores_chl = scores_chl.masked_fill(hidden_cl[:, None], -math.inf)
    lse_ch = scores_chl.logsumexp(2)
    if spec.sinks is not None:
        lse_ch = torch.logaddexp(lse_ch, torch.tensor(spec.sinks, device="cuda").double())
    return torch.einsum("chl,lhe->che", (scores_chl - lse_ch[..., None]).exp(), v_lhe), lse_ch


def make_spec(
    dtype: str = "bfloat16", dim: int = 128, kv_heads: int = 2, **fields: object
) -> KVSpec:
    if dtype == "float8_e4m3":
        fields = {"k_scale": 0.02, "v_scale": 0.03, **fields}
    sizes = {"k_dim": dim, "v_dim": dim, **fields}
    return KVSpec(kv_heads=kv_heads, dtype=dtype, scale=dim**-0.5, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", list(STORED))
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 32, 48, 64, 128])
def test_types_head_sizes_and_blocks(dtype: str, dim: int, block_size: int) -> None:
    Rows(make_spec(dtype, dim), 8, block_size, RAGGED).check()


@pytest.mark.parametrize("dtype", list(STORED))
@pytest.mark.parametrize("group", range(1, 17))
def test_groups(dtype: str, group: int) -> None:
    Rows(make_spec(dtype), 2 * group, 16, RAGGED).check()


@pytest.mark.parametrize("dtype", list(STORED))
@pytest.mark.parametrize("dim", [64, 256])
def test_a_few_and_many_query_tokens(dtype: str, dim: int) -> None:
    counts = [1, 60, 1, 33, 2, 8, 9, 1]
    Rows(make_spec(dtype, dim), 8, 16, [100, 64, 40, 200, 7, 300, 90, 513], counts).check()
    Rows(make_spec(dtype, dim), 6, 16, [100, 64, 40, 200], [2, 4, 1, 3]).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3"])
@pytest.mark.parametrize("kind", ["fresh", "alike", "chunk", "mixed"])
@pytest.mark.parametrize("by", ["ours", "sdpa", "sdpa of 8.x"])
def test_prompts(dtype: str, kind: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa.Shapes, "pay", lambda *_: by != "ours")
    if "8.x" in by:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    rows = {
        "fresh": ([700, 300, 257], [700, 300, 257]),
        "alike": ([300, 300, 300], [300, 300, 300]),
        "chunk": ([1700, 900], [512, 300]),
        "mixed": ([700, 900, 1000, 40], [700, 1, 300, 40]),
    }
    lengths, counts = rows[kind]
    Rows(make_spec(dtype), 8, 16, lengths, counts).check()


@pytest.mark.parametrize("by_sdpa", [False, True])
def test_a_fresh_prompt_with_sinks(by_sdpa: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa.Shapes, "pay", lambda *_: by_sdpa)
    Rows(make_spec(sinks=(0.5, -1.0, 6.0, 0.0)), 4, 16, [600], [600]).check()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("wide", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_long_and_ragged_rows(dtype: str, wide: torch.dtype, batch_invariant: bool) -> None:
    lengths = [100_000, 1, 77, 5000, 20_000]
    Rows(make_spec(dtype), 8, 32, lengths, [], wide, batch_invariant).check()


@pytest.mark.parametrize("count", [1, 5])
def test_every_part_of_a_long_row(count: int) -> None:
    """With one KV head a row has a part on every multiprocessor: more than are merged at a time."""
    Rows(make_spec(kv_heads=1), 4, 16, [40_000], [count]).check()


@pytest.mark.parametrize("rows", [300, 2000])
def test_many_rows(rows: int) -> None:
    Rows(make_spec(), 8, 16, [1 + 7 * i % 90 for i in range(rows)]).check()


@pytest.mark.parametrize(
    "fields",
    [
        {"window": 37},
        {"window": 1024},
        {"softcap": 1.5},
        {"sinks": (0.5, -1.0, 2.0, 0.0, 4.0, -3.0)},
        {"alibi_slopes": (0.5, 0.25, 0.125, 0.06, 0.03, 0.01)},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_features_over_several_parts(fields: dict[str, object], batch_invariant: bool) -> None:
    lengths, counts = [1, 36, 300, 45, 200, 9000], [1, 1, 4, 45, 60, 1]
    rows = Rows(make_spec(**fields), 6, 16, lengths, counts, batch_invariant=batch_invariant)
    rows.check()


CHUNKS = {
    "split over the context": ([8192], [256]),
    "several splits, ragged": ([9001], [64]),
    "fresh": ([1025, 300], [1025, 300]),
    "beside decode rows": ([4000, 9000, 1, 700, 64, 33], [1, 300, 1, 1, 64, 3]),
    "alike": ([700] * 20, [5] * 20),
    "many short": ([77] * 200, [20] * 200),
}


@pytest.mark.parametrize("rows", list(CHUNKS))
@pytest.mark.parametrize("fields", [{}, {"window": 300}, {"sinks": (0.5, -1.0, 2.0, 0.0) * 2}])
def test_chunks(rows: str, fields: dict[str, object]) -> None:
    lengths, counts = CHUNKS[rows]
    Rows(make_spec(**fields), 8, 16, lengths, counts).check()


LIBRARY_LAYERS = {
    "plain": {},
    "window": {"window": 300},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": (0.5, -1.0, 2.0, 0.0) * 2},
    "size 64": {"dim": 64},
    "size 256": {"dim": 256},
    "float16": {"dtype": "float16"},
    "alibi, by ours": {"alibi_slopes": (0.5, 0.25, 0.1, 0.0) * 2},
}


@pytest.mark.parametrize(("library", "block_size"), [("flashinfer", 16), ("flash-attn", 256)])
@pytest.mark.parametrize("layer", list(LIBRARY_LAYERS))
@pytest.mark.parametrize("rows", ["fresh", "split over the context", "beside decode rows"])
def test_prompts_by_a_library(library: str, block_size: int, layer: str, rows: str) -> None:
    """Whichever are installed. Blocks of 256 tokens: any version of FlashAttention takes them."""
    try:
        find_prompt_attention(library)
    except ConfigError as reason:
        pytest.skip(str(reason))
    spec = make_spec(**LIBRARY_LAYERS[layer])
    one = Rows(spec, 8, block_size, *CHUNKS[rows], prompt_attention=library)
    if "ours" in layer:
        one.check()
        return
    prompts = one.backend._prompts
    assert prompts is not None
    with count_calls(prompts) as calls:
        one.check()
    assert calls == [0, 0], "the layer of both calls"


@contextmanager
def count_calls(prompts: PromptAttention) -> Iterator[list[int]]:
    calls, attend = list[int](), prompts.attend

    def counted(layer: int, *args: Any) -> Any:
        calls.append(layer)
        return attend(layer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "attend", counted)
        yield calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("block_size", [16, 48])
def test_chunks_of_types_head_sizes_and_blocks(dtype: str, dim: int, block_size: int) -> None:
    lengths, counts = [300, 513, 1000, 700], [300, 100, 33, 1]
    Rows(make_spec(dtype, dim), 8, block_size, lengths, counts).check()


@pytest.mark.parametrize("group", range(1, 17))
def test_chunks_of_groups(group: int) -> None:
    Rows(make_spec(), 2 * group, 16, [300, 700, 1000, 40], [300, 100, 1, 40]).check()


SMALL = {
    "decode": ([1, 17, 300, 700], [1, 1, 1, 1], 2),
    "parts": ([6000], [1], 1),
    "few tokens": ([100, 64, 40], [5, 5, 5], 2),
    "prompt": ([200], [200], 1),
    "chunk in parts, and a decode row": ([2500, 90], [60, 1], 1),
}


@pytest.mark.parametrize("rows", list(SMALL))
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_small_shapes(rows: str, batch_invariant: bool) -> None:
    """Every way of the kernels, as few as can be: tests/gpu/test_cuda_sanitizer.py slows them."""
    lengths, counts, kv_heads = SMALL[rows]
    spec = make_spec(kv_heads=kv_heads)
    Rows(spec, 4 * kv_heads, 16, lengths, counts, batch_invariant=batch_invariant).check()


def test_a_row_alone_and_among_others_gives_the_same_bits() -> None:
    rows = Rows(make_spec(), 8, 16, [9000, 40, 3000, 700], batch_invariant=True)
    together, lse = rows.attend()
    for row in range(4):
        one = slice(row, row + 1)
        starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
        alone, alone_lse = rows.backend.attend(
            0, rows.q_thd[one], starts, rows.tables[one], rows.lengths_r[one]
        )
        assert torch.equal(alone, together[one])
        assert torch.equal(alone_lse, lse[one])


def test_a_captured_call_reads_lengths_and_tables_anew() -> None:
    rows = Rows(make_spec(), 8, 16, [900, 40, 3000, 700])
    long = rows.lengths_r.clone()
    rows.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = rows.attend()
    for lengths in (long, torch.tensor([1, 30, 2999, 16], device="cuda")):
        rows.lengths_r.copy_(lengths)
        graph.replay()
        expected_o, expected_lse = rows.attend()
        assert torch.equal(o, expected_o)
        assert torch.equal(lse, expected_lse)
    rows.lengths_r.copy_(torch.tensor([0, 30, 0, 16], device="cuda"))
    before = o.clone()
    graph.replay()
    assert torch.equal(o[[0, 2]], before[[0, 2]]), "a row without tokens was written"


def test_the_pool_moves_as_blocks() -> None:
    rows = Rows(make_spec("float8_e4m3"), 8, 16, [900, 40])
    expected, _ = rows.attend()
    blocks = [int(b) for b in rows.tables.flatten().tolist() if b >= 0]
    data = rows.backend.export_blocks(blocks)
    rows.memory.fill_(0xFF)
    rows.backend.import_blocks(blocks, data)
    assert torch.equal(rows.attend()[0], expected)
