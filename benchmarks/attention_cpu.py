"""Paged decode attention on a CPU: GB/s of KV, over its floor, over other kernels.

One token of each request attends over a context of its own, through the backend. The KV is cold:
calls rotate over block tables that name, in random order, more than twice the last-level cache. The
floor is the KV's bytes over the read bandwidth, or the multiply-adds over their peak, whichever is
longer. On a shared machine the bandwidth moves, so it is measured before and after every round of
calls: `of floor` is the median of the rounds' ratios, each to the bandwidth of its own time.

Peers: ``sdpa`` is PyTorch's kernel, over keys and values that lie in order (in bfloat16 for int8
rows); ``--peer llama.cpp=PYTHON`` adds ggml's flash attention, in order too (q8_0 for int8), and
``--peer vllm=PYTHON`` vLLM's, over blocks (bfloat16 for int8).

A grid takes long; ``--part 2/5`` runs its second fifth, ``--merge`` prints what ``--json`` wrote.

    python benchmarks/attention_cpu.py --rows 'b16-c4k-*' --peer llama.cpp=/path/to/venv/bin/python

A row is called ``b<batch>-c<context>-h<query heads>/<KV heads>/<head size>-<type>``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import mmap
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from _common import Row, describe_run, finish, parser, peak_flops
from _peers import run_kernel_peer
from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for

BATCHES = (1, 4, 16, 64)
CONTEXTS = {"128": 128, "1k": 1024, "4k": 4096, "16k": 16384}
HEADS = ((9, 3, 64), (32, 8, 96), (32, 8, 128), (32, 32, 128), (64, 8, 128))
DTYPES = ("bfloat16", "float16", "float32", "int8")
QUICK = "b4-c1k-*-bfloat16"
BLOCK = 32
LARGEST = 4 << 30
"""Bytes of KV; larger rows are named and left out."""
ROUNDS = 5
PROBE = 256 << 20
"""Bytes that the bandwidth is measured over."""


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    heads: int
    kv_heads: int
    dim: int
    dtype: str

    @property
    def name(self) -> str:
        context = {tokens: text for text, tokens in CONTEXTS.items()}[self.context]
        heads = f"{self.heads}/{self.kv_heads}/{self.dim}"
        return f"b{self.batch}-c{context}-h{heads}-{self.dtype}"

    @property
    def spec(self) -> KVSpec:
        return KVSpec(
            kv_heads=self.kv_heads,
            k_dim=self.dim,
            v_dim=self.dim,
            dtype=self.dtype,
            scale=self.dim**-0.5,
        )

    @property
    def kv_bytes(self) -> int:
        return self.batch * self.context * self.spec.token_bytes

    @property
    def flops(self) -> int:
        """Two for each multiply-add."""
        return 4 * self.batch * self.context * self.heads * self.dim

    @property
    def compute(self) -> torch.dtype:
        """Of the queries, and of SDPA's keys and values."""
        return torch.bfloat16 if self.dtype == "int8" else getattr(torch, self.dtype)


def shapes(patterns: list[str]) -> list[Shape]:
    every = [
        Shape(batch, context, *heads, dtype)
        for heads in HEADS
        for dtype in DTYPES
        for batch in BATCHES
        for context in CONTEXTS.values()
    ]
    return [s for s in every if any(fnmatch.fnmatch(s.name, p) for p in patterns)]


def last_level_cache() -> int:
    """Bytes of the largest cache that a core sees; 32 MiB where the system does not say."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM]?)", path.read_text().strip())
        if match:
            sizes.append(int(match[1]) << {"": 0, "K": 10, "M": 20}[match[2]])
    return max(sizes, default=32 << 20)


class Rotation:
    """Calls in turn, as many as keep each one's memory out of the caches."""

    def __init__(self, calls: list[Callable[[], object]]) -> None:
        self.calls = calls
        for call in calls[:2]:
            call()

    def seconds(self, least: float = 0.05) -> float:
        """Of one call, over at least one turn and ``least`` seconds."""
        done, started = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - started < least:
            for call in self.calls:
                call()
            done += len(self.calls)
        return (time.perf_counter() - started) / done


def copies_of(shape: Shape, cache: int) -> int:
    return max(1, -(-2 * cache // shape.kv_bytes)) if shape.kv_bytes < 4 * cache else 1


def memory(nbytes: int) -> memoryview:
    """In huge pages where the system has them, as pools of the inproc transport are."""
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)


def our_calls(shape: Shape, copies: int, threads: int) -> Rotation:
    needed = shape.batch * blocks_for(shape.context, BLOCK)
    layout = PoolLayout((shape.spec,), BLOCK, needed * copies)
    backend = CpuAttention(threads)
    backend.allocate(layout, shape.heads, memory(layout.total_bytes))
    step = 1 << 12
    k, v = torch.randn(2, step, shape.kv_heads, shape.dim).to(shape.compute).unbind()
    total = layout.num_blocks * BLOCK
    for at in range(0, total, step):
        slots = torch.arange(at, min(total, at + step))
        backend.append(0, k[: len(slots)], v[: len(slots)], slots)
    order = torch.randperm(layout.num_blocks).to(torch.int32)
    tables = order.view(copies, shape.batch, -1)
    q = torch.randn(shape.batch, shape.heads, shape.dim).to(shape.compute)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    return Rotation([lambda t=t: backend.attend(0, q, starts, t, lengths) for t in tables])


def sdpa_calls(shape: Shape, copies: int) -> Rotation:
    q = torch.randn(shape.batch, shape.heads, 1, shape.dim).to(shape.compute)
    size = (shape.batch, shape.kv_heads, shape.context, shape.dim)
    one = torch.randn(1, 1, *size[2:]).to(shape.compute)
    pairs = [[one.expand(size).clone() for _ in range(2)] for _ in range(copies)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return Rotation([lambda k=k, v=v: sdpa(q, k, v, enable_gqa=True) for k, v in pairs])


class Probe:
    """The read bandwidth, as a dot product over memory like a pool's; bytes per second."""

    def __init__(self) -> None:
        self._data = torch.frombuffer(memory(PROBE), dtype=torch.float32).fill_(1)

    def __call__(self) -> float:
        started = time.perf_counter()
        torch.dot(self._data, self._data)
        return self._data.nbytes / (time.perf_counter() - started)


@dataclass(frozen=True)
class Rounds:
    """Seconds of a call in each round, and the bandwidth around it in bytes per second."""

    seconds: list[float]
    bandwidth: list[float]

    def of_floor(self, nbytes: int, least: float) -> float:
        """The floor over what was measured; ``least`` is what the multiply-adds take."""
        rounds = zip(self.seconds, self.bandwidth, strict=True)
        return statistics.median(max(nbytes / bandwidth, least) / s for s, bandwidth in rounds)


def measured(rotation: Rotation, probe: Probe) -> Rounds:
    """Calls and probes take turns; a round's bandwidth is the mean of those around it."""
    seconds, probed = [], [probe()]
    for _ in range(ROUNDS):
        seconds.append(rotation.seconds())
        probed.append(probe())
    around = [statistics.mean(probed[i : i + 2]) for i in range(ROUNDS)]
    return Rounds(seconds, around)


@dataclass
class Bench:
    threads: int
    peers: list[str]
    peaks: dict[torch.dtype, float]
    cache: int
    probe: Probe

    def rows(self, shape: Shape) -> list[Row]:
        copies = copies_of(shape, self.cache)
        ours = measured(our_calls(shape, copies, self.threads), self.probe)
        seconds = min(ours.seconds)
        taken = {"sdpa": min(measured(sdpa_calls(shape, copies), self.probe).seconds)}
        for peer in self.peers:
            job = {**vars(shape), "copies": copies, "rounds": ROUNDS}
            taken[peer.partition("=")[0]] = run_kernel_peer(peer, job, self.threads)["seconds"]
        reading = shape.kv_bytes / statistics.median(ours.bandwidth)
        computing = shape.flops / self.peaks[shape.compute]
        floor = max(reading, computing)
        params = {
            "MiB": round(shape.kv_bytes / 2**20, 1),
            "GB/s": round(shape.kv_bytes / seconds / 1e9, 1),
            "floor GB/s": round(shape.kv_bytes / floor / 1e9, 1),
            "floor is": "reads" if floor == reading else "multiply-adds",
            "of floor": round(ours.of_floor(shape.kv_bytes, computing), 3),
            "counts": "yes" if shape.kv_bytes > 4 * self.cache else "",
            **{f"x {name}": round(value / seconds, 2) for name, value in taken.items()},
        }
        return [Row(shape.name, seconds * 1e6, "us", params)]


def arguments() -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--rows", action="append", metavar="GLOB", help="only rows of such names")
    made.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="llama.cpp, vllm"
    )
    made.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="of the rows")
    made.add_argument("--merge", type=Path, nargs="+", metavar="PATH", help="print these instead")
    return made.parse_args()


def part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"want I/N with I from 1 to N, not {text!r}")
    return int(match[1]), int(match[2])


def merged(paths: list[Path]) -> list[Row]:
    rows = [row for path in paths for row in json.loads(path.read_text())]
    return [Row(row.pop("name"), row.pop("value"), row.pop("unit"), row) for row in rows]


def main() -> None:
    args = arguments()
    if args.merge:
        finish(merged(args.merge), args.json)
        return
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    print(describe_run(args.threads))
    peaks = {t: peak_flops(args.threads, t) for t in (torch.float32, torch.bfloat16)}
    # 16 bits of a float16 are widened: its products run at the rate of float32.
    peaks[torch.float16] = peaks[torch.float32]
    bench = Bench(args.threads, args.peer, peaks, last_level_cache(), Probe())
    best = max(bench.probe() for _ in range(5))
    print(
        f"reads {best / 1e9:.1f} GB/s; multiply-adds float32 {peaks[torch.float32] / 2e9:.0f} G/s, "
        f"bfloat16 {peaks[torch.bfloat16] / 2e9:.0f} G/s; cache {bench.cache >> 20} MiB"
    )
    rows = []
    index, count = args.part
    for shape in shapes([QUICK] if args.quick else args.rows or ["*"])[index - 1 :: count]:
        if shape.kv_bytes > LARGEST:
            print(f"{shape.name}: left out, {shape.kv_bytes / 2**30:.1f} GiB of KV")
            continue
        rows += bench.rows(shape)
        print(rows[-1].name, rows[-1].params, flush=True)
    finish(rows, args.json)


if __name__ == "__main__":
    main()
