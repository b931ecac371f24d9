"""Paged decode attention on a CPU: GB/s of KV, over its floor, over other kernels.

One token of each request attends over a context of its own, through the backend. The KV is cold:
calls rotate over block tables that name, in random order, more than twice the last-level cache. The
floor is the KV's bytes over the read bandwidth, or the multiply-adds over their peak, whichever is
longer. On a shared machine the bandwidth moves, so it is measured before and after every round of
calls: `of floor` is the median of the rounds' ratios, each to the bandwidth of its own time. Such
a read is in order. The second floor, `paged`, is a bare loop over the call's own runs of memory, a
block's keys and values of one head at a time, asked for ahead (needs ``c++``): head by head, and
two blocks at a time, as a call may; the faster one counts.

Peers, over rows above 512 MiB with a part of the requests: ``sdpa`` is PyTorch's kernel, over keys
and values that lie in order (in bfloat16 for int8 rows); ``--peer llama.cpp=PYTHON`` adds ggml's
flash attention, in order too (q8_0 for int8), and ``--peer vllm=PYTHON`` vLLM's, over blocks
(bfloat16 for int8).

A grid takes long; ``--part 2/5`` runs its second fifth, ``--merge`` prints what ``--json`` wrote,
and how many rows meet the goals.

    python benchmarks/attention_cpu.py --rows 'b16-c4k-*' --peer llama.cpp=/path/to/venv/bin/python

A row is called ``b<batch>-c<context>-h<query heads>/<KV heads>/<head size>-<type>``.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from _common import Row, describe_run, finish, parser, peak_flops, write
from _paged import PagedReader, runs_of
from _peers import KernelPeer
from cloverinfer.attention.cpu import CpuAttention
from cloverinfer.core.memory import private_memory
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for

BATCHES = (1, 4, 16, 64)
CONTEXTS = {"128": 128, "1k": 1024, "4k": 4096, "16k": 16384}
HEADS = ((9, 3, 64), (32, 8, 96), (32, 8, 128), (32, 32, 128), (64, 8, 128))
DTYPES = ("bfloat16", "float16", "float32", "int8")
QUICK = "b4-c1k-*-bfloat16"
BLOCK = 32
LARGEST = 4 << 30
"""Bytes of KV; larger rows are named and left out."""
PEER_LARGEST = 512 << 20
"""Bytes of KV that peers run over; their time is multiplied where a row has more."""
ROUNDS = 5
PEER_ROUNDS = 3
LEAST = 0.03
"""Seconds of a round."""
SETTLE = 0.005
"""Seconds that do not count before it: OpenMP's threads of what ran before wait awake so long."""
GOAL = 0.9
"""Of the floor, where the KV exceeds four times the last-level cache."""
PEAKS = (torch.float32, torch.bfloat16, torch.float16)
"""Types that a rate of multiply-adds is known of."""
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
    def run_bytes(self) -> int:
        """A block's keys, or values, of one head."""
        return BLOCK * self.dim * (1 if self.dtype == "int8" else self.compute.itemsize)

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
        calls[0]()

    def seconds(self) -> float:
        """Of one call, over whole turns of ``LEAST`` seconds, once what ran before has settled."""
        self._turns(SETTLE)
        return self._turns(LEAST)

    def _turns(self, least: float) -> float:
        done, started = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - started < least:
            for call in self.calls:
                call()
            done += len(self.calls)
        return (time.perf_counter() - started) / done


def copies_of(shape: Shape, cache: int) -> int:
    return max(1, -(-2 * cache // shape.kv_bytes)) if shape.kv_bytes < 4 * cache else 1


def our_calls(shape: Shape, copies: int, threads: int) -> tuple[Rotation, list[torch.Tensor]]:
    """And the addresses that they read, in two orders, at most of ``PROBE`` bytes."""
    needed = shape.batch * blocks_for(shape.context, BLOCK)
    layout = PoolLayout((shape.spec,), BLOCK, needed * copies)
    backend = CpuAttention(threads)
    pool = memoryview(private_memory(layout.total_bytes))
    backend.allocate(layout, shape.heads, pool)
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
    calls = Rotation([lambda t=t: backend.attend(0, q, starts, t, lengths) for t in tables])
    base = torch.frombuffer(pool, dtype=torch.uint8).data_ptr()
    block_bytes = layout.total_bytes // layout.num_blocks
    orders = runs_of(base, block_bytes, shape.kv_heads, shape.run_bytes, tables.flatten(0, 1))
    return calls, [runs[: PROBE // shape.run_bytes] for runs in orders]


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
        self._data = torch.frombuffer(private_memory(PROBE), dtype=torch.float32).fill_(1)

    def __call__(self) -> float:
        started = time.perf_counter()
        torch.dot(self._data, self._data)
        return self._data.nbytes / (time.perf_counter() - started)


@dataclass(frozen=True)
class Rounds:
    """Seconds of a call in each round, and the bandwidth around it in bytes per second."""

    seconds: list[float]
    bandwidth: list[float]
    paged: list[float]  # the same of the call's own runs; empty where that was not measured

    def of_floor(self, nbytes: int, least: float) -> float:
        """The floor over what was measured; ``least`` is what the multiply-adds take."""
        return _of_floor(self.seconds, self.bandwidth, nbytes, least)

    def of_paged(self, nbytes: int, least: float) -> float:
        """The same over the paged floor."""
        return _of_floor(self.seconds, self.paged, nbytes, least)


def _of_floor(seconds: list[float], bandwidth: list[float], nbytes: int, least: float) -> float:
    rounds = zip(seconds, bandwidth, strict=True)
    return statistics.median(max(nbytes / rate, least) / taken for taken, rate in rounds)


def measured(rotation: Rotation, probe: Probe, paged: Callable[[], float] | None) -> Rounds:
    """Calls and probes take turns; a round's bandwidth is the mean of those around it."""
    seconds, probed, read = [], [probe()], []
    for _ in range(ROUNDS):
        seconds.append(rotation.seconds())
        read += [paged()] if paged else []
        probed.append(probe())
    around = [statistics.mean(probed[i : i + 2]) for i in range(ROUNDS)]
    return Rounds(seconds, around, read)


@dataclass
class Bench:
    threads: int
    peers: list[KernelPeer]
    peaks: dict[torch.dtype, float]
    cache: int
    probe: Probe
    reader: PagedReader | None
    alone: bool
    """Without peers."""

    def rows(self, shape: Shape) -> list[Row]:
        ours = self.ours(shape)
        seconds = min(ours.seconds)
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
        }
        if ours.paged:
            params["paged GB/s"] = round(statistics.median(ours.paged) / 1e9, 1)
            params["of paged"] = round(ours.of_paged(shape.kv_bytes, computing), 3)
        for name, taken in ({} if self.alone else self.taken(shape)).items():
            params[f"x {name}"] = "" if taken is None else round(taken / seconds, 2)
        return [Row(shape.name, seconds * 1e6, "us", params)]

    def ours(self, shape: Shape) -> Rounds:
        calls, orders = our_calls(shape, copies_of(shape, self.cache), self.threads)
        reader = self.reader
        if reader is None:
            return measured(calls, self.probe, None)
        return measured(
            calls, self.probe, lambda: max(reader.bandwidth(o, shape.run_bytes) for o in orders)
        )

    def taken(self, shape: Shape) -> dict[str, float | None]:
        """Seconds of the peers; None where one does not take the shape."""
        part = shape
        while part.kv_bytes > PEER_LARGEST and part.batch > 4:
            part = replace(part, batch=part.batch // 2)
        copies = copies_of(part, self.cache)
        calls = sdpa_calls(part, copies)
        taken: dict[str, float | None] = {
            "sdpa": min(calls.seconds() for _ in range(PEER_ROUNDS if part == shape else 1))
        }
        del calls  # its memory, before others take as much
        job = {**vars(part), "copies": copies, "rounds": PEER_ROUNDS, "least": LEAST}
        for peer in self.peers:
            taken[peer.name] = peer.seconds(job)
        times = shape.batch // part.batch
        return {name: of_part and of_part * times for name, of_part in taken.items()}


def arguments() -> argparse.Namespace:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    made.add_argument("--rows", action="append", metavar="GLOB", help="only rows of such names")
    made.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PYTHON", help="llama.cpp, vllm"
    )
    made.add_argument("--counted", action="store_true", help="only rows that the goal is for")
    made.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help="of the rows")
    made.add_argument("--ours", action="store_true", help="without peers")
    made.add_argument("--merge", type=Path, nargs="+", metavar="PATH", help="print these instead")
    return made.parse_args()


def part(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise argparse.ArgumentTypeError(f"want I/N with I from 1 to N, not {text!r}")
    return int(match[1]), int(match[2])


def merged(paths: list[Path]) -> list[Row]:
    rows = [row for path in paths for row in json.loads(path.read_text())]
    order = {shape.name: i for i, shape in enumerate(shapes(["*"]))}
    rows.sort(key=lambda row: order[row["name"]])
    return [Row(row.pop("name"), row.pop("value"), row.pop("unit"), row) for row in rows]


def summary(rows: list[Row]) -> str:
    """How many rows meet the goals."""
    counted = [row.params for row in rows if row.params["counts"]]
    lines = [f"{len(rows)} rows, {len(counted)} of them over four times the last-level cache"]
    for floor in ("of floor", "of paged"):
        ratios = [params[floor] for params in counted if floor in params]
        if ratios:
            met = sum(ratio >= GOAL for ratio in ratios)
            lines.append(
                f"{floor}: {met} at {GOAL} or more, median {statistics.median(ratios):.3f}, "
                f"least {min(ratios):.3f}"
            )
    for peer in dict.fromkeys(key for row in rows for key in row.params if key.startswith("x ")):
        beaten = {row.name: row.params.get(peer) for row in rows if row.params.get(peer)}
        slower = [name for name, ratio in beaten.items() if ratio < 1]
        lines.append(f"{peer}: slower on {len(slower)} of {len(beaten)} rows {slower}")
    return "\n".join(lines)


def described(args: argparse.Namespace, bench: Bench) -> str:
    best = max(bench.probe() for _ in range(5))
    wide, narrow = (bench.peaks[t] / 2e9 for t in (torch.float32, torch.bfloat16))
    return (
        f"{describe_run(args.threads)}\nreads {best / 1e9:.1f} GB/s; multiply-adds float32 "
        f"{wide:.0f} G/s, bfloat16 {narrow:.0f} G/s; cache {bench.cache >> 20} MiB"
    )


def main() -> None:
    args = arguments()
    if args.merge:
        rows = merged(args.merge)
        finish(rows, args.json)
        print(summary(rows))
        return
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    peaks = {dtype: peak_flops(args.threads, dtype) for dtype in PEAKS}
    peers = [KernelPeer(peer, args.threads) for peer in args.peer]
    reader = PagedReader.build(args.threads)
    bench = Bench(args.threads, peers, peaks, last_level_cache(), Probe(), reader, args.ours)
    print(described(args, bench))
    rows = []
    index, count = args.part
    wanted = shapes([QUICK] if args.quick else args.rows or ["*"])
    wanted = [s for s in wanted if s.kv_bytes > 4 * bench.cache or not args.counted]
    for shape in wanted[index - 1 :: count]:
        if shape.kv_bytes > LARGEST:
            print(f"{shape.name}: left out, {shape.kv_bytes / 2**30:.1f} GiB of KV")
            continue
        rows += bench.rows(shape)
        print(rows[-1].name, rows[-1].params, flush=True)
        write(rows, args.json)  # what is cut short is not lost
    for peer in peers:
        peer.close()
    finish(rows, args.json)
    print(summary(rows))


if __name__ == "__main__":
    main()
