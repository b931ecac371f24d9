"""The C++ attention kernels: instruction sets, thread counts and roundings side by side."""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import pytest
import torch

from cloverinfer import _native
from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.attention.rows import attend_fast, attend_plain, merge
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for

pytestmark = pytest.mark.usefixtures("one_torch_thread")

BLOCK = 16
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Between instruction sets and thread counts: the last bit of the type, at unit size."""


def make_spec(dtype: torch.dtype, dim: int = 64, **fields: object) -> KVSpec:
    name = str(dtype).removeprefix("torch.")
    return KVSpec(kv_heads=2, k_dim=dim, v_dim=dim, dtype=name, scale=dim**-0.5, **fields)  # type: ignore[arg-type]


def attend(
    spec: KVSpec, lengths: list[int], group: int = 3, threads: int = 2, isa: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode of random rows, the same whatever the threads and the instruction set."""
    torch.manual_seed(1)
    needed = [blocks_for(length, BLOCK) for length in lengths]
    layout = PoolLayout((spec,), BLOCK, sum(needed))
    backend = CpuAttention(threads, isa)
    backend.allocate(layout, 2 * group)
    dtype = torch.bfloat16 if spec.dtype == "int8" else getattr(torch, spec.dtype)
    tokens = layout.num_blocks * BLOCK
    k, v = torch.randn(2, tokens, 2, spec.k_dim).to(dtype).unbind()
    backend.append(0, k, v, torch.arange(tokens))
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = torch.arange(at, at + count)
        at += count
    q = torch.randn(len(lengths), 2 * group, spec.k_dim).to(dtype)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    result = backend.attend(0, q, starts, tables, torch.tensor(lengths, dtype=torch.int32))
    backend.close()
    return result


def close(a: tuple[torch.Tensor, torch.Tensor], b: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert (a[0].float() - b[0].float()).abs().max() <= TOLERANCE[a[0].dtype]
    assert (a[1] - b[1]).abs().max() <= 1e-5


def test_the_portable_kernels_are_always_there() -> None:
    assert _native.attention_isas()[0] == "portable"


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("group", [1, 2, 3, 4, 6, 7, 20])
def test_instruction_sets_agree(isa: str, dtype: torch.dtype, group: int) -> None:
    spec = make_spec(dtype, softcap=2.0, window=700)
    lengths = [1, 2, 15, 62, 64, 65, 900]  # keys are met three at a time, one or two left over
    close(attend(spec, lengths, group, isa=isa), attend(spec, lengths, group, isa="portable"))


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("group", [1, 3, 4, 6, 7, 20])
def test_instruction_sets_agree_over_int8(isa: str, dim: int, group: int) -> None:
    spec = make_spec(torch.int8, dim, window=700)
    lengths = [1, 15, 62, 64, 65, 900]
    o, lse = attend(spec, lengths, group, isa=isa)
    expected = attend(spec, lengths, group, isa="portable")
    # A number between two steps of int8 may be stored as either: fused products round once. And
    # AMX takes weights as bfloat16, where other instruction sets have 15 bits.
    assert (o.float() - expected[0].float()).abs().max() <= (3e-2 if isa == "amx" else 2e-2)
    assert (lse - expected[1]).abs().max() <= 4e-3


@pytest.mark.parametrize("isa", _native.attention_isas())
def test_a_query_that_is_no_number_gives_none_over_int8(isa: str) -> None:
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((make_spec(torch.int8),), BLOCK, 1), 4)
    backend.append(0, torch.ones(2, 2, 64), torch.ones(2, 2, 64), torch.arange(2))
    q = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    q[0, 1, 5] = math.nan
    starts, table = torch.tensor([0, 1]).int(), torch.zeros(1, 1, dtype=torch.int32)
    o, _ = backend.attend(0, q, starts, table, 2 * starts[1:])
    assert o[0, 1].isnan().all()
    assert torch.equal(o[0, [0, 2, 3]].float(), torch.ones(3, 64))


@pytest.mark.parametrize("isa", _native.attention_isas())
def test_products_of_others_on_the_same_thread_are_left_alone(isa: str) -> None:
    """PyTorch keeps AMX's registers shaped between its products of bfloat16."""
    a, b = torch.randn(2, 256, 256).bfloat16().unbind()
    before = a @ b
    attend(make_spec(torch.bfloat16), [100, 900], 20, threads=1, isa=isa)
    assert torch.equal(a @ b, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_appends_of_several_threads_are_those_of_one(dtype: str) -> None:
    torch.manual_seed(5)
    spec = make_spec(getattr(torch, dtype), 96)
    k, v = torch.randn(2, 1500, 2, 96).unbind()
    slots = torch.randint(0, 1024, (1500,))  # some twice: the later token stays
    pools = []
    for threads in (1, 3):
        backend = CpuAttention(threads)
        backend.allocate(PoolLayout((spec,), BLOCK, 64), 2)
        nothing = torch.zeros(1024, 2, 96)  # a new pool holds whatever memory held
        backend.append(0, nothing, nothing, torch.arange(1024))
        backend.append(0, k, v, slots)
        pools.append(backend.export_blocks(list(range(64))))
        backend.close()
    assert torch.equal(*pools)
    last = {int(slot): t for t, slot in enumerate(slots)}
    if dtype == "float32":
        stored = pools[1].view(64, -1).view(torch.float32).view(64, 2, 2, BLOCK, 96)
        for slot, t in list(last.items())[:50]:
            assert torch.equal(stored[slot // BLOCK, 0, :, slot % BLOCK], k[t])
            assert torch.equal(stored[slot // BLOCK, 1, :, slot % BLOCK], v[t])


@pytest.mark.parametrize("isa", _native.attention_isas())
def test_a_forced_instruction_set_is_used(isa: str) -> None:
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((make_spec(torch.float32), make_spec(torch.float32, 8)), 16, 1), 2)
    assert backend._native is not None
    assert backend._native.isa(0) == isa
    assert backend._native.isa(1) != "avx512", "8 elements are narrower than its vectors"


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="portable"):
        CpuAttention(1, "neon9").allocate(PoolLayout((make_spec(torch.float32),), 16, 1), 2)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths", [[4000], [1, 2000, 3, 5], [300] * 9])
def test_thread_counts_agree(dtype: torch.dtype, lengths: list[int]) -> None:
    one = attend(make_spec(dtype), lengths, threads=1)
    for threads in (2, 3):
        many = attend(make_spec(dtype), lengths, threads=threads)
        close(many, one)
        again = attend(make_spec(dtype), lengths, threads=threads)
        assert torch.equal(many[0], again[0])
        assert torch.equal(many[1], again[1])


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_token_gives_its_value_back(isa: str, dtype: torch.dtype) -> None:
    """Loads and stores of every kind of number, subnormal ones, ties and infinity included."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1.0, -1.5, info.max, info.min, info.smallest_normal]
    values += [info.smallest_normal * s for s in (0.5, 0.75, -0.25)] + [math.pi, 1e-3, -7.0]
    if dtype != torch.float32:
        values += [math.inf, info.smallest_normal * info.eps]
    values += [0.1 * i for i in range(64 - len(values))]
    spec = make_spec(dtype)
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((spec,), BLOCK, 1), 2)
    v = torch.tensor(values).to(dtype).expand(1, 2, 64)
    backend.append(0, torch.zeros_like(v), v.contiguous(), torch.tensor([5]))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    backend.append(0, torch.zeros(1, 2, 64, dtype=dtype), v.contiguous(), torch.tensor([0]))
    table = torch.zeros(1, 1, dtype=torch.int32)
    length = torch.ones(1, dtype=torch.int32)
    o, lse = backend.attend(0, torch.zeros(1, 2, 64, dtype=dtype), starts, table, length)
    if isa == "avx512bf16" and dtype == torch.bfloat16:  # its products take subnormals for zero
        v = torch.where(v.abs() < info.smallest_normal, 0, v)
    assert torch.equal(o, v)
    assert torch.equal(lse, torch.zeros(1, 2))


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_results_round_to_nearest(isa: str, dtype: torch.dtype) -> None:
    """The mean of two neighbours is a tie, which goes to the even one, as torch's does."""
    spec = make_spec(dtype)
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((spec,), BLOCK, 1), 2)
    low = torch.cat([torch.linspace(-3, 3, 96), torch.linspace(-2e-6, 2e-6, 32)])
    low = low.to(dtype).view(1, 2, 64)
    high = (
        torch.nextafter(low, torch.tensor(math.inf, dtype=dtype))
        if dtype != torch.float16
        else ((low.view(torch.int16) + 1).view(dtype))
    )
    v = torch.cat([low, high])
    backend.append(0, torch.zeros_like(v), v, torch.tensor([0, 1]))
    starts = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    o, _ = backend.attend(0, torch.zeros(1, 2, 64, dtype=dtype), starts, table, 2 * starts[1:])
    assert torch.equal(o[0], ((low.float() + high.float()) / 2).to(dtype)[0])


def test_bad_calls_of_the_binding_are_refused() -> None:
    pool = torch.zeros(1 << 16, dtype=torch.uint8)
    base = pool.data_ptr() + -pool.data_ptr() % 64
    fields = {"dtype": 0, "kv_heads": 1, "group": 2, "k_dim": 8, "v_dim": 8}
    fields |= {"scale": 1.0, "window": 0, "softcap": 0.0}
    with pytest.raises(ValueError, match="threads"):
        _native.CpuAttentionPool(0, "auto", base, 1 << 12, 16, 4)
    with pytest.raises(ValueError, match="aligned"):
        _native.CpuAttentionPool(1, "auto", base + 4, 1 << 12, 16, 4)
    native = _native.CpuAttentionPool(1, "auto", base, 1 << 12, 16, 4)
    native.add_layer(**fields, sinks=[], alibi_slopes=[])
    with pytest.raises(ValueError, match="fit"):
        native.add_layer(**fields, sinks=[], alibi_slopes=[])
    with pytest.raises(ValueError, match="sink"):
        native.add_layer(**fields, sinks=[1.0], alibi_slopes=[])
    with pytest.raises(ValueError, match="no such layer"):
        native.append(1, 0, base, 8, base, 8, base, 1)
    with pytest.raises(ValueError, match="type code"):
        native.append(0, 9, base, 8, base, 8, base, 1)
    with pytest.raises(ValueError, match="tokens are floats"):
        native.append(0, 3, base, 8, base, 8, base, 1)
    with pytest.raises(ValueError, match="aligned"):
        native.append(0, 0, base + 2, 8, base, 8, base, 1)
    with pytest.raises(ValueError, match="overlap"):
        native.append(0, 0, base, 7, base, 8, base, 2)


@pytest.mark.parametrize(
    ("starts", "lengths", "match"),
    [
        ([0, 2, 1], [4, 4], "query_starts"),
        ([0, 0, 2], [4, 4], "no query token"),
        ([0, 1, 2], [4, 0], "more query tokens"),
        ([0, 1, 2], [4, 33], "longer than its block table"),
    ],
)
def test_rows_that_cannot_be_are_refused(starts: list[int], lengths: list[int], match: str) -> None:
    backend = CpuAttention(1)
    backend.allocate(PoolLayout((make_spec(torch.float32),), BLOCK, 2), 2)
    q, tables = torch.zeros(2, 2, 64), torch.zeros(2, 2, dtype=torch.int32)
    of = [torch.tensor(x, dtype=torch.int32) for x in (starts, lengths)]
    with pytest.raises(ValueError, match=match):
        backend.attend(0, q, of[0], tables, of[1])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("queries", "length"), [(65, 65), (40, 200), (9, 300)])
@pytest.mark.parametrize("window", [None, 30, 1000])
def test_fused_prompts_agree_with_the_reference(
    dtype: torch.dtype, queries: int, length: int, window: int | None
) -> None:
    torch.manual_seed(2)
    q = torch.randn(queries, 6, 64).to(dtype)
    k, v = torch.randn(2, 2, length, 64).to(dtype).unbind()
    spec = make_spec(dtype, window=window)
    fast, plain = attend_fast(spec, q, k, v), attend_plain(spec, q, k, v)
    assert (fast[0].float() - plain[0].float()).abs().max() <= 3 * TOLERANCE[dtype]
    assert (fast[1] - plain[1]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("dim", [64, 72, 80])
def test_prompts_and_chunks_agree_with_the_reference(
    isa: str, dtype: torch.dtype, window: int | None, dim: int
) -> None:
    """A fresh prompt, a chunk over a cached prefix and a decode row in one call; head sizes that
    are odd and even multiples of an instruction set's vector."""
    torch.manual_seed(5)
    queries, lengths = [65, 40, 1], [65, 300, 90]
    spec = make_spec(dtype, dim, window=window)
    needed = [blocks_for(length, BLOCK) for length in lengths]
    backend = CpuAttention(2, isa)
    backend.allocate(PoolLayout((spec,), BLOCK, sum(needed)), 6)
    order = torch.randperm(sum(needed)).to(torch.int32)
    tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for table, own in zip(tables, order.split(needed), strict=True):
        table[: len(own)] = own
    kv = [torch.randn(2, length, 2, dim).to(dtype) for length in lengths]
    for table, (k, v) in zip(tables, kv, strict=True):
        at = torch.arange(len(k))
        backend.append(0, k, v, table[at // BLOCK].long() * BLOCK + at % BLOCK)
    q = torch.randn(sum(queries), 6, dim).to(dtype)
    starts = torch.tensor([0, 65, 105, 106], dtype=torch.int32)
    o, lse = backend.attend(0, q, starts, tables, torch.tensor(lengths, dtype=torch.int32))
    backend.close()
    for rows, (k, v) in zip(
        zip(q.split(queries), o.split(queries), lse.split(queries), strict=True), kv, strict=True
    ):
        expected = attend_plain(spec, rows[0], k.transpose(0, 1), v.transpose(0, 1))
        assert (rows[1].float() - expected[0].float()).abs().max() <= 3 * TOLERANCE[dtype]
        assert (rows[2] - expected[1]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-3)


@pytest.mark.parametrize("isa", _native.attention_isas())
def test_prompts_of_bfloat16_stay_native_where_there_are_vectors(
    isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    attend = CpuAttention._attend_prompt
    monkeypatch.setattr(
        CpuAttention,
        "_attend_prompt",
        lambda self, *args: gathered.append(1) or attend(self, *args),
    )
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((make_spec(torch.bfloat16),), BLOCK, 2), 6)
    k, v = torch.randn(2, 20, 2, 64).bfloat16().unbind()
    backend.append(0, k, v, torch.arange(20))
    row = [torch.tensor(x, dtype=torch.int32) for x in ([0, 20], [[0, 1]], [20])]
    backend.attend(0, torch.randn(20, 6, 64).bfloat16(), *row)
    native = backend.native()
    assert native is not None
    assert bool(gathered) == (isa == "portable") == (native.max_queries < 20)
    backend.close()


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("window", [40, 95])
def test_windows_that_begin_within_small_blocks(
    isa: str, dtype: torch.dtype, block: int, window: int
) -> None:
    """Blocks that follow one another in the pool, of one KV head: their keys lie as far apart as
    those of one long block would, with values between."""
    torch.manual_seed(7)
    spec = msgspec.structs.replace(make_spec(dtype, window=window), kv_heads=1)
    k, v = torch.randn(2, 104, 1, 64).to(dtype).unbind()
    q = torch.randn(1, 20, 64).to(dtype)
    backend = CpuAttention(1, isa)
    backend.allocate(PoolLayout((spec,), block, 104 // block), 20)
    backend.append(0, k, v, torch.arange(104))
    table = torch.arange(104 // block, dtype=torch.int32)[None]
    for length in (101, 103, 104):
        lengths = torch.tensor([length], dtype=torch.int32)
        o, lse = backend.attend(0, q, torch.tensor([0, 1]).int(), table, lengths)
        expected = attend_plain(spec, q, *(x[:length].transpose(0, 1) for x in (k, v)))
        assert (o.float() - expected[0].float()).abs().max() <= 3 * TOLERANCE[dtype]
        assert (lse - expected[1]).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-3)
    backend.close()


HEADS_TOGETHER, THEIR_GROUP = 9, 2
PER_HEAD = {"sinks": (0.3,) * 18, "alibi_slopes": (0.01,) * 18}


@pytest.mark.parametrize("isa", _native.attention_isas())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("lengths", [[4200], [1, 700, 64, 333]])
@pytest.mark.parametrize("fields", [{"window": 500}, PER_HEAD])
def test_heads_that_share_a_span_answer_as_each_alone(
    isa: str, dtype: torch.dtype, lengths: list[int], fields: dict[str, object]
) -> None:
    """Heads of 32 KiB and more in a block take turns tile by tile, in one span or several."""
    torch.manual_seed(6)
    dim = 256 if dtype == torch.int8 else 128
    whole = msgspec.structs.replace(make_spec(dtype, dim, **fields), kv_heads=HEADS_TOGETHER)
    each = {name: of if name == "window" else of[:THEIR_GROUP] for name, of in fields.items()}  # type: ignore[index]
    alone = msgspec.structs.replace(make_spec(dtype, dim, **each), kv_heads=1)
    needed = [blocks_for(length, BLOCK) for length in lengths]
    order = torch.randperm(sum(needed)).to(torch.int32).split(needed)
    tables = torch.nn.utils.rnn.pad_sequence(list(order), batch_first=True)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    numbers = torch.bfloat16 if dtype == torch.int8 else dtype
    k, v = torch.randn(2, sum(needed) * BLOCK, HEADS_TOGETHER, dim).to(numbers).unbind()
    q = torch.randn(len(lengths), HEADS_TOGETHER, THEIR_GROUP, dim).to(numbers)

    def answers(spec: KVSpec, heads: slice, threads: int) -> tuple[torch.Tensor, torch.Tensor]:
        backend = CpuAttention(threads, isa)
        backend.allocate(PoolLayout((spec,), BLOCK, sum(needed)), spec.kv_heads * THEIR_GROUP)
        backend.append(0, k[:, heads], v[:, heads], torch.arange(len(k)))
        own = q[:, heads].flatten(1, 2)
        result = backend.attend(0, own, starts, tables, torch.tensor(lengths, dtype=torch.int32))
        backend.close()
        return result

    ones = [answers(alone, slice(head, head + 1), 1) for head in range(HEADS_TOGETHER)]
    expected = torch.cat([o for o, _ in ones], 1), torch.cat([lse for _, lse in ones], 1)
    for threads in (1, 2):
        close(answers(whole, slice(HEADS_TOGETHER), threads), expected)


def test_the_reference_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    q, (k, v) = torch.randn(50, 6, 16), torch.randn(2, 2, 80, 16).unbind()
    spec = make_spec(torch.float32, 16, window=20, sinks=(0.0,) * 6, alibi_slopes=(0.1,) * 6)
    whole = attend_plain(spec, q, k, v)
    monkeypatch.setattr("cloverinfer.attention.rows._SCORES_AT_A_TIME", 6 * 80 * 7)
    close(attend_plain(spec, q, k, v), whole)


def test_merge_of_disjoint_contexts() -> None:
    torch.manual_seed(4)
    q, (k, v) = torch.randn(1, 6, 16), torch.randn(2, 2, 80, 16).unbind()
    spec = make_spec(torch.float32, 16)
    halves = [attend_plain(spec, q, k[:, at], v[:, at]) for at in (slice(30), slice(30, 80))]
    close(merge(*halves), attend_plain(spec, q, k, v))


def test_idle_threads_use_no_processor() -> None:
    """Processor time of the whole process, while its threads have nothing to do."""
    spec = make_spec(torch.float32)
    backend = CpuAttention(3)
    backend.allocate(PoolLayout((spec,), BLOCK, 256), 6)
    tokens = 256 * BLOCK
    k = torch.randn(tokens, 2, 64)
    backend.append(0, k, k, torch.arange(tokens))
    table = torch.arange(256, dtype=torch.int32)[None]
    starts, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens]).int()
    used = time.process_time()
    backend.attend(0, torch.randn(1, 6, 64), starts, table, length)
    assert time.process_time() > used, "the clock stands still"
    used = time.process_time()
    time.sleep(0.6)
    assert time.process_time() - used < 0.2, "threads wait awake"
    backend.close()


def switches(threads: list[Path]) -> int:
    """How often threads gave up the processor by themselves."""
    lines = [line for thread in threads for line in (thread / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary"))


def asleep(threads: list[Path]) -> bool:
    return all(
        (thread / "stat").read_text().rpartition(")")[2].split()[0] == "S" for thread in threads
    )


@pytest.mark.parametrize(("length", "woken"), [(600, False), (6000, True)])
def test_threads_asleep_are_woken_for_much_kv_alone(length: int, woken: bool) -> None:
    """300 and 3,000 KiB of it."""
    before = set(Path("/proc/self/task").iterdir())
    spec = make_spec(torch.bfloat16)
    backend = CpuAttention(5)  # a pool of its own size, and so of its own
    backend.allocate(PoolLayout((spec,), BLOCK, blocks_for(length, BLOCK)), 4)
    workers = sorted(set(Path("/proc/self/task").iterdir()) - before)
    assert len(workers) == 4
    q = torch.ones(1, 4, 64, dtype=torch.bfloat16)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    tables = torch.arange(blocks_for(length, BLOCK), dtype=torch.int32)[None]
    lengths = torch.tensor([length], dtype=torch.int32)
    for _ in range(3000):  # a worker that has not yet begun to sleep
        time.sleep(0.01)
        if asleep(workers):
            break
    else:
        pytest.fail("the workers do not sleep")
    slept = switches(workers)
    backend.attend(0, q, starts, tables, lengths)
    for _ in range(3000 if woken else 10):
        time.sleep(0.01)
        if switches(workers) != slept:
            break
    assert (switches(workers) != slept) == woken
    backend.close()
