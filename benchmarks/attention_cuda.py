"""Paged attention on a GPU: decode, or prompts with ``--prompts``.

Decode: microseconds, GB/s of KV, over the read bandwidth of the run.

Calls go through the backend, captured in a graph that rotates over KV pools of more than twice the
L2 in all, with blocks in random order. The floor is the KV's bytes over the read bandwidth, which
is a sum over 2 GiB. ``fa3`` are FlashAttention-3's times, measured on an H200 before. FlashInfer
and flash-attn have rows beside ours where they are installed (``_attention_peers.py``).

    python benchmarks/attention_cuda.py

Prompts: each kernel behind PyTorch's SDPA on keys and values that lie in order, our paged kernel,
and for fresh prompts all that the backend does (gather, then SDPA, with the host's waits); over the
same pool FlashInfer's paged prefill and FlashAttention's, where they are installed, as
``--prompt-attention`` has them. A chunk of ``c`` tokens ends a row of ``n``. The floor is the
operations over the rate of a large bfloat16 matrix product in the same run.

    python benchmarks/attention_cuda.py --prompts
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from _attention_peers import Decode, peers, prompt_peers
from _common import Row, finish, parser
from cloverinfer.attention.cuda import CudaAttention, missing
from cloverinfer.attention.prompts.base import STORED, DeviceRows
from cloverinfer.kvcache.layout import KVSpec, PoolLayout, blocks_for
from cloverinfer.transport.base import DeviceMemory

FA3 = {
    (1, 1024): 16.3,
    (1, 8192): 21.4,
    (1, 65536): 78.4,
    (8, 1024): 19.6,
    (8, 8192): 76.1,
    (32, 1024): 47.1,
    (32, 8192): 256.9,
    (128, 1024): 148.0,
    (128, 4096): 501.3,
    (256, 1024): 282.6,
    (256, 2048): 515.7,
}
"""Microseconds; 32 query heads, 8 KV heads, size 128, bfloat16, block 16."""
ROTATED = 160 << 20
"""Bytes of KV that a graph goes through at least."""


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    dtype: str = "bfloat16"
    dim: int = 128
    group: int = 4
    block: int = 16
    kv_heads: int = 8


OTHERS = [
    *(Shape(32, 8192, group=group) for group in (1, 8)),
    *(Shape(batch, context, dim=64) for batch, context in ((32, 8192), (256, 1024))),
    *(Shape(batch, context, dtype="float8_e4m3") for batch, context in ((32, 8192), (256, 1024))),
    *(Shape(batch, context, block=32) for batch, context in ((32, 8192), (256, 1024))),
    Shape(32, 8192, dtype="float16"),
    Shape(32, 8192, dim=256),
]


@dataclass(frozen=True)
class Prompt:
    """``count`` tokens at the end of a row of ``length``; 32 query heads, 8 KV heads, size 128."""

    length: int
    count: int

    @property
    def operations(self) -> int:
        seen = self.count * (self.length - self.count) + self.count * (self.count + 1) // 2
        return 4 * 32 * 128 * seen

    @property
    def fresh(self) -> bool:
        return self.count == self.length


PROMPTS = [
    *(Prompt(length, length) for length in (512, 1024, 4096, 16384)),
    Prompt(1024, 256),
    Prompt(8192, 512),
    Prompt(8192, 2048),
    Prompt(32768, 2048),
]
MATH_MOST = 4096
"""Tokens; math keeps every score."""


def graph_seconds(calls: list[Callable[[], object]], replays: int, launches: int = 60) -> float:
    """Seconds of one call, of calls in turn within one graph of about ``launches``: the median of
    replays.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeats = max(1, launches // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times = []
    for _ in range(replays + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / (repeats * len(calls)))
    return statistics.median(times[1:])


def read_bandwidth(replays: int) -> float:
    """Bytes per second of a sum over 2 GiB, two of them in turn."""
    pools = [torch.ones(1 << 29, device="cuda") for _ in range(2)]
    return pools[0].nbytes / graph_seconds([lambda p=p: p.sum() for p in pools], replays)


def attention_seconds(shape: Shape, replays: int) -> tuple[dict[str, float], int]:
    """Seconds of one call, ours first, and bytes of KV."""
    spec = KVSpec(
        kv_heads=shape.kv_heads,
        k_dim=shape.dim,
        v_dim=shape.dim,
        dtype=shape.dtype,
        scale=shape.dim**-0.5,
    )
    kv_bytes = shape.batch * shape.context * spec.token_bytes
    pools = max(2, -(-ROTATED // kv_bytes))
    needed = shape.batch * blocks_for(shape.context, shape.block)
    layout = PoolLayout((spec,), shape.block, needed * pools)
    heads = shape.kv_heads * shape.group
    backend = CudaAttention()
    memory = torch.empty(layout.total_bytes, dtype=torch.uint8, device="cuda")
    backend.allocate(layout, heads, DeviceMemory(memory.data_ptr(), memory.numel(), 0))
    fill(backend, layout)
    backend.settle_rows()  # as after an append, where a model calls
    order = torch.randperm(layout.num_blocks, device="cuda").to(torch.int32)
    tables = order.view(pools, shape.batch, -1)
    stored = STORED[shape.dtype]
    dtype = torch.bfloat16 if stored == torch.float8_e4m3fn else stored
    q = torch.randn(shape.batch, heads, shape.dim, device="cuda").to(dtype)
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda")
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device="cuda")
    calls = [lambda t=t: backend.attend(0, q, starts, t, lengths) for t in tables]
    seconds = {"attention": graph_seconds(calls, replays)}
    pool = memory.view(stored).view(-1, 2, shape.kv_heads, shape.block, shape.dim)
    others = peers(Decode(pool, q, tables, lengths, spec.scale)) if stored == dtype else {}
    seconds |= {name: graph_seconds(calls, replays) for name, calls in others.items() if calls}
    backend.close()
    return seconds, kv_bytes


def fill(backend: CudaAttention, layout: PoolLayout) -> None:
    """Random tokens in every slot."""
    spec, step = layout.specs[0], 1 << 16
    total = layout.num_blocks * layout.block_size
    dtype = torch.bfloat16 if spec.dtype == "float8_e4m3" else STORED[spec.dtype]
    k, v = torch.randn(2, step, spec.kv_heads, spec.k_dim, device="cuda").to(dtype).unbind()
    for at in range(0, total, step):
        slots = torch.arange(at, min(total, at + step), device="cuda")
        backend.append(0, k[: len(slots)], v[: len(slots)], slots)


def rows_of(shape: Shape, bandwidth: float, replays: int) -> list[Row]:
    by_name, kv_bytes = attention_seconds(shape, replays)
    usual = shape == Shape(shape.batch, shape.context)
    known = FA3.get((shape.batch, shape.context)) if usual else None
    params = {
        "shape": f"{shape.batch} x {shape.context:,}",
        "kv": f"{shape.dtype} d{shape.dim} g{shape.group} b{shape.block}",
    }
    floor = kv_bytes / bandwidth * 1e6
    rows = []
    for name, seconds in by_name.items():
        reached = {
            "GB/s": round(kv_bytes / seconds / 1e9),
            "of bandwidth": round(kv_bytes / seconds / bandwidth, 3),
        }
        took = seconds * 1e6
        rows.append(Row(name, took, "us", params | reached, floor, known and "fa3", known))
    return rows


def eager_seconds(call: Callable[[], object], calls: int = 10) -> float:
    """Seconds of one call, of several from the host after each other."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def matrix_rate(replays: int) -> float:
    """Operations per second of a product of two 8192 x 8192 bfloat16 matrices."""
    a, b = torch.randn(2, 8192, 8192, device="cuda").to(torch.bfloat16).unbind()
    return 2 * 8192**3 / graph_seconds([lambda: a @ b], replays, 8)


def sdpa_seconds(prompt: Prompt, kernel: SDPBackend, replays: int) -> float:
    """Seconds of a call on keys and values in order, repeated for every query head."""
    q, k, v = (
        torch.randn(1, 32, tokens, 128, device="cuda").to(torch.bfloat16)
        for tokens in (prompt.count, prompt.length, prompt.length)
    )
    how = {"is_causal": True} if prompt.fresh else {"attn_mask": _ending(prompt)}
    with sdpa_kernel(kernel):
        return graph_seconds([lambda: scaled_dot_product_attention(q, k, v, **how)], replays, 8)


def _ending(prompt: Prompt) -> torch.Tensor:
    return causal_lower_right(prompt.count, prompt.length)


def prompt_seconds(prompt: Prompt, replays: int) -> dict[str, float]:
    """Of the backend: our kernel, which is what serves under capture, and a fresh prompt's way."""
    spec = KVSpec(kv_heads=8, k_dim=128, v_dim=128, dtype="bfloat16", scale=128**-0.5)
    layout = PoolLayout((spec,), 16, blocks_for(prompt.length, 16))
    backend = CudaAttention()
    backend.allocate(layout, 32)
    fill(backend, layout)
    q = torch.randn(prompt.count, 32, 128, device="cuda").to(torch.bfloat16)
    table = torch.randperm(layout.num_blocks, device="cuda").to(torch.int32)[None]
    starts = torch.tensor([0, prompt.count], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([prompt.length], dtype=torch.int32, device="cuda")
    call = lambda: backend.attend(0, q, starts, table, lengths)  # noqa: E731
    seconds = {"paged kernel": graph_seconds([call], replays, 8)}
    others = prompt_peers(backend.memory(), layout, q, DeviceRows(starts, table, lengths))
    seconds |= {name: graph_seconds([theirs], replays, 8) for name, theirs in others.items()}
    if prompt.fresh:
        seconds["backend"] = eager_seconds(call)
    backend.close()
    return seconds


def prompt_rows(prompt: Prompt, rate: float, replays: int) -> list[Row]:
    seconds = prompt_seconds(prompt, replays)
    kernels = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    for name in kernels:
        if name == "MATH" and prompt.length > MATH_MOST:
            continue
        if not prompt.fresh and name in ("CUDNN_ATTENTION", "MATH"):
            continue  # torch gives chunks to the other two only
        try:
            seconds[f"SDPA {name}"] = sdpa_seconds(prompt, SDPBackend.__members__[name], replays)
        except RuntimeError as error:
            print(f"{name} does not serve {prompt}: {str(error).splitlines()[0]}")
    shape = f"{prompt.count:,} of {prompt.length:,}"
    floor = prompt.operations / rate * 1e6
    return [
        Row(
            "prompt",
            took * 1e6,
            "us",
            {"shape": shape, "by": by, "TFLOP/s": round(prompt.operations / took / 1e12)},
            floor,
        )
        for by, took in seconds.items()
    ]


def measure_prompts(replays: int, quick: bool) -> list[Row]:
    rate = matrix_rate(replays)
    print(f"matrix product {rate / 1e12:.0f} TFLOP/s")
    prompts = PROMPTS[::4] if quick else PROMPTS
    return [row for prompt in prompts for row in prompt_rows(prompt, rate, replays)]


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--prompts", action="store_true", help="prompts in place of decode")
    args = arguments.parse_args()
    if missing():
        print(f"nothing measured: {missing()}")
        return
    replays = 3 if args.quick else 9
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if args.prompts:
        finish(measure_prompts(replays, args.quick), args.json)
        return
    bandwidth = read_bandwidth(replays)
    print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s")
    table = [Shape(batch, context) for batch, context in FA3]
    shapes = table[::4] if args.quick else [*table, *OTHERS]
    finish([row for shape in shapes for row in rows_of(shape, bandwidth, replays)], args.json)


if __name__ == "__main__":
    main()
