"""The dense half's small GPU kernels, and the sampler: microseconds a launch, over the floor.

Launches are captured in a graph, 100 in a row, each of which may begin while the one before it
ends; they rotate over buffers of more than twice the L2. Shapes are Llama-3.1-8B's. The floor is
the bytes that must be read and written over the bandwidth of a copy of 2 GiB in the same run; it is
left out below a microsecond, which no launch can show. "torch us" is what PyTorch's own operators
take.

    python benchmarks/dense_cuda.py
    python benchmarks/dense_cuda.py --sampling
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from _common import Row, finish, parser
from cloverinfer.attention.cuda import missing
from cloverinfer.models.cuda_kernels import DenseKernels
from cloverinfer.models.device_sampling import DRAW_DTYPES, DeviceSampler
from cloverinfer.models.rope import rope_table

LAUNCHES = 100
ROTATED = 160 << 20
"""Bytes that a graph goes through at least, where buffers are many."""
ROWS = [1, 8, 32, 128, 256, 8192]
HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB = 4096, 14336, 32, 8, 128, 128256
EPS = 1e-5
DEVICE = torch.device("cuda", 0)


@dataclass
class Case:
    name: str
    nbytes: int
    run: Callable[[int], object]
    """One launch on the i-th buffers."""
    peer: Callable[[int], object] | None = None
    buffers: int = 1


def time_us(run: Callable[[int], object], buffers: int) -> float:
    """Of one launch, the median of replays."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(3):
            run(i % buffers)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(LAUNCHES):
            run(i % buffers)
    times = []
    for _ in range(12):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
    return statistics.median(times[2:])


def copy_bandwidth() -> float:
    """Bytes per second, read and written."""
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * source.nbytes / statistics.median(times[2:])


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(dtype)


def copies(nbytes: int) -> int:
    return max(1, min(LAUNCHES, -(-ROTATED // nbytes)))


def norm_cases(rows: int, dtype: torch.dtype) -> list[Case]:
    kernels, size = DenseKernels(dtype, DEVICE), dtype.itemsize
    unit = rows * HIDDEN * size
    n = copies(2 * unit)
    hidden, added = (normal(n, rows, HIDDEN, dtype=dtype) for _ in range(2))
    weight, table = normal(HIDDEN, dtype=dtype), normal(VOCAB, HIDDEN, dtype=dtype)
    ids = torch.randint(VOCAB, (n, rows), device=DEVICE)

    def torch_add_norm(i: int) -> object:
        return F.rms_norm(hidden[i] + added[i], (HIDDEN,), weight, EPS)

    def torch_embed(i: int) -> object:
        return F.rms_norm(F.embedding(ids[i], table), (HIDDEN,), weight, EPS)

    return [
        Case(
            "norm",
            2 * unit,
            lambda i: kernels.norm(hidden[i], weight, EPS),
            lambda i: F.rms_norm(hidden[i], (HIDDEN,), weight, EPS),
            n,
        ),
        Case(
            "add_norm",
            4 * unit,
            lambda i: kernels.add_norm(hidden[i], added[i], weight, EPS),
            torch_add_norm,
            n,
        ),
        Case(
            "embed_norm",
            3 * unit,
            lambda i: kernels.embed_norm(table, ids[i], weight, EPS),
            torch_embed,
            n,
        ),
    ]


def gate_case(rows: int, dtype: torch.dtype) -> Case:
    kernels, unit = DenseKernels(dtype, DEVICE), rows * FFN * dtype.itemsize
    n = copies(2 * unit)
    both = normal(n, rows, 2 * FFN, dtype=dtype)

    def torch_gate(i: int) -> object:
        gate, up = both[i].chunk(2, -1)
        return F.silu(gate).mul_(up)

    return Case("gate", 3 * unit, lambda i: kernels.gate(both[i]), torch_gate, n)


def rotate_cases(rows: int, dtype: torch.dtype) -> list[Case]:
    kernels, heads = DenseKernels(dtype, DEVICE), (HEADS, KV_HEADS, KV_HEADS)
    unit = rows * DIM * dtype.itemsize
    n = copies(sum(heads) * unit)
    qkv = normal(n, rows, sum(heads), DIM, dtype=dtype)
    cos, sin = (part.to(DEVICE) for part in rope_table(DIM, 5e5, None, 8192, dtype))
    norm = normal(HEADS + KV_HEADS, DIM, dtype=dtype)
    positions = torch.randint(8192, (rows,), device=DEVICE)
    parts = [x.split_with_sizes(heads, 1) for x in qkv]
    apart = [torch.empty((rows, count, DIM), dtype=dtype, device=DEVICE) for count in heads]

    def rotate(i: int, normed: bool = False, away: bool = False) -> None:
        to = apart if away else parts[i]
        kernels.rotate(
            qkv[i],
            (to[0], to[1], to[2]),
            positions,
            (cos, sin),
            norm if normed else None,
            EPS,
        )

    def torch_rotate(i: int) -> object:
        qk = qkv[i][:, : HEADS + KV_HEADS]
        return qk.mul(cos[positions]).add_(qk.roll(DIM // 2, -1).mul_(sin[positions]))

    inside = 2 * (HEADS + KV_HEADS) * unit
    return [
        Case("rotate", inside, rotate, torch_rotate, n),
        Case("rotate with norm", inside, lambda i: rotate(i, normed=True), None, n),
        Case("rotate to places", 2 * sum(heads) * unit, lambda i: rotate(i, away=True), None, n),
    ]


SETTINGS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top_k 50": (1.0, 50, 1.0, 0.0),
    "top_p 0.9": (1.0, 0, 0.9, 0.0),
    "top_k 50, top_p 0.9, min_p 0.01": (0.8, 50, 0.9, 0.01),
}
"""Temperature, top_k, top_p, min_p."""


def sampling_case(rows: int, dtype: torch.dtype, name: str, peaked: bool) -> Case:
    sampler = DeviceSampler(DEVICE)
    n = copies(rows * VOCAB * dtype.itemsize)
    logits = normal(n, rows, VOCAB, dtype=torch.float32)
    logits = (logits.abs().pow_(2.5) * 2 if peaked else logits).to(dtype)
    numbers = [*SETTINGS[name], 0.0]
    draws = {
        key: torch.full((rows,), number, dtype=kind, device=DEVICE)
        for (key, kind), number in zip(DRAW_DTYPES.items(), numbers, strict=True)
    }
    draws["uniform"] = torch.rand(rows, dtype=torch.float64, device=DEVICE)
    out = torch.empty(rows, dtype=torch.int64, device=DEVICE)
    peer = (lambda i: logits[i].max(-1)) if name == "greedy" else None
    nbytes = rows * VOCAB * dtype.itemsize
    return Case(name, nbytes, lambda i: sampler(logits[i], draws, out), peer, n)


def measure(case: Case, rows: int, bandwidth: float, **params: object) -> Row:
    value = time_us(case.run, case.buffers)
    floor = case.nbytes / bandwidth * 1e6
    peer = None if case.peer is None else time_us(case.peer, case.buffers)
    gbps = case.nbytes / value / 1e3
    return Row(
        case.name,
        round(value, 2),
        "us",
        {
            "rows": rows,
            **params,
            "GB/s": round(gbps),
            "torch us": None if peer is None else round(peer, 2),
        },
        floor if floor > 1 else None,
    )


def main() -> None:
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument(
        "--sampling", action="store_true", help="the sampler rather than the rest"
    )
    args = arguments.parse_args()
    if missing():
        raise SystemExit(missing())
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: a copy runs at {bandwidth / 1e9:.0f} GB/s")
    rows: list[Row] = []
    counts = [1, 32] if args.quick else ROWS
    for count in counts:
        if not args.sampling:
            cases = [*norm_cases(count, torch.bfloat16), gate_case(count, torch.bfloat16)]
            cases += rotate_cases(count, torch.bfloat16)
            rows += [measure(case, count, bandwidth) for case in cases]
            del cases
        elif count <= 256:
            for dtype in (torch.bfloat16, torch.float32):
                for name in SETTINGS:
                    for peaked in (False, True):
                        case = sampling_case(count, dtype, name, peaked)
                        kind = {"type": str(dtype)[6:], "logits": "peaked" if peaked else "flat"}
                        rows.append(measure(case, count, bandwidth, **kind))
                        del case
    finish(rows, args.json)


if __name__ == "__main__":
    main()
