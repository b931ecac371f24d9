"""What GPU benchmarks of whole models share: a model of known shapes, what it reads and computes at
least, and the device's speeds, measured in the same run."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from _common import Row, parser
from _peers import PeerProcess
from cloverinfer import LLM, ModelConfig
from cloverinfer.attention.cuda import missing

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""Llama-3.1-8B's shapes; without its scaling of positions, which changes no cost."""


@dataclass(frozen=True)
class Cost:
    """Of a model in bfloat16, or with its layers' matrices in float8."""

    weights: int
    """Bytes that every decode step reads."""
    flops: int
    """Of the products, for each token."""
    kv_bytes: int
    """Of a token's keys and values."""
    layers: int
    attention: int
    """Floating-point operations of a layer's attention, for each pair of tokens."""


def cost_of(shape: dict[str, Any], quantization: str | None = None) -> Cost:
    hidden, ffn, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv, layers = (
        shape[f"num_{name}"] for name in ("attention_heads", "key_value_heads", "hidden_layers")
    )
    layer = hidden * size * (2 * heads + 2 * kv) + 3 * hidden * ffn
    head = hidden * shape["vocab_size"]
    nbytes = (1 if quantization == "fp8" else 2) * layers * layer + 2 * head
    flops = 2 * (layers * layer + head)
    return Cost(nbytes, flops, 4 * kv * size * layers, layers, 4 * heads * size)


@dataclass(frozen=True)
class Speeds:
    """Measured here and now."""

    read: float
    """Bytes a second."""
    products: float
    """Floating-point operations a second, bfloat16."""


def measure_speeds() -> Speeds:
    speeds = Speeds(_read_speed(), _products_speed())
    torch.cuda.empty_cache()
    return speeds


def _read_speed() -> float:
    numbers = torch.ones(2**30, device="cuda")  # 4 GiB
    return numbers.nbytes / best_time(numbers.sum, 10)


def _products_speed() -> float:
    size = 8192
    a, b = (torch.randn((size, size), device="cuda").bfloat16() for _ in range(2))
    return 2 * size**3 / best_time(lambda: a @ b, 10)


def best_time(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run, by events."""
    work()
    times = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        work()
        last.record()
        last.synchronize()
        times.append(first.elapsed_time(last) / 1e3)
    return min(times)


@contextlib.contextmanager
def engine(shape: dict[str, Any], quantization: str | None, **fields: Any) -> Iterator[LLM]:
    """A colocated node with random weights."""
    with _shape_folder(shape) as folder:
        model = ModelConfig(
            model_path=folder, load_format="dummy", dtype="bfloat16", quantization=quantization
        )
        began = time.perf_counter()
        with LLM(model, topology="colocated", **fields) as llm:
            print(f"engine started in {time.perf_counter() - began:.1f} s", flush=True)
            yield llm


@contextlib.contextmanager
def _shape_folder(shape: dict[str, Any]) -> Iterator[str]:
    """A model directory with a configuration alone."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        yield folder


class Vllm:
    """vLLM with random weights on the same GPU, in its own environment."""

    def __init__(self, process: PeerProcess, name: str) -> None:
        self._process = process
        self.name = name
        """With its version."""

    def measure(self, prompts: list[list[int]], tokens: int) -> tuple[float | None, float]:
        """Seconds per output token of the request that began last, where ``tokens`` are to be
        timed, and those that the prompts took to be read."""
        answer = self._process.ask({"prompts": prompts, "tokens": tokens}, timeout=300)
        return answer.get("tpot"), answer["reading"]


@contextlib.contextmanager
def vllm(shape: dict[str, Any], given: argparse.Namespace, more_tokens: int) -> Iterator[Vllm]:
    """The one of ``--peer``, with the limits of ``limits_of``; ours is not on the GPU meanwhile."""
    python = given.peer.removeprefix("vllm=")
    torch.cuda.empty_cache()
    with _shape_folder(shape) as folder:
        settings = {
            "model": folder,
            "load_format": "dummy",
            "dtype": "bfloat16",
            "quantization": given.quantization,
            **_lengths_of(given, more_tokens),
        }
        process = PeerProcess("vLLM", python, "_peer_vllm_gpu.py")
        try:
            began = time.perf_counter()
            started = process.ask(settings, timeout=600)["name"]
            print(f"{started} started in {time.perf_counter() - began:.1f} s", flush=True)
            yield Vllm(process, started)
        finally:
            process.close()


def random_prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = random.Random(f"{seed} {length}")  # none begins with one of another length
    return [[rng.randrange(vocab) for _ in range(length)] for _ in range(count)]


Times = dict[str, tuple[float, int]]
"""By kernel: microseconds and launches."""


def kernel_times(work: Callable[[], object]) -> Times:
    """Of what ``work`` launches. A kernel that was started before the one before it had ended
    counts from its start, so that times may add up to more than the clock's."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return {e.key: (e.device_time_total, e.count) for e in profile.key_averages()}


def print_profile(times: Times, steps: int, most: int = 25) -> None:
    """``times``: of so many steps."""
    rows = [(took, count, name) for name, (took, count) in times.items() if count > 0]
    total = sum(row[0] for row in rows)
    print(f"| us a step | launches | of {total / steps:.0f} us | kernel |\n|---|---|---|---|")
    for took, count, name in sorted(rows, reverse=True)[:most]:
        share = 100 * took / total
        print(f"| {took / steps:.1f} | {count / steps:.1f} | {share:.1f}% | {name[:90]} |")


def flags(description: str | None, rows: str, repeat: int) -> argparse.ArgumentParser:
    """``rows`` and ``repeat``: what is measured unless told otherwise."""
    made = parser(description or "")
    made.add_argument("--rows", type=parse_rows, default=parse_rows(rows), help="8x1024,1x8192")
    made.add_argument(
        "--repeat", type=int, default=repeat, help="measurements of each row; best counts"
    )
    made.add_argument("--out", type=Path, help="also write the table to this file")
    made.add_argument("--profile", action="store_true", help="print each row's time by kernel")
    made.add_argument("--peer", metavar="vllm=PYTHON", help="then measure vLLM in the same way")
    made.add_argument("--executor", default="local", help="local or process")
    made.add_argument("--quantization", choices=["fp8"], help="of the layers' matrices")
    made.add_argument("--budget", type=int, default=16384, help="max_num_batched_tokens")
    return made


def parse_flags(made: argparse.ArgumentParser) -> argparse.Namespace:
    """``--quick``: the first row, once. Ends where there is no GPU."""
    given = made.parse_args()
    if missing():
        raise SystemExit(f"nothing measured: {missing()}")
    if given.peer and not given.peer.startswith("vllm="):
        made.error(f"--peer {given.peer}: want vllm=PYTHON")
    if given.quick:
        given.rows, given.repeat = given.rows[:1], 1
    return given


def limits_of(given: argparse.Namespace, more_tokens: int) -> dict[str, Any]:
    """Fields of the engine: room for all rows at once, and for so many tokens past a prompt."""
    return {**_lengths_of(given, more_tokens), "executor": given.executor}


def _lengths_of(given: argparse.Namespace, more_tokens: int) -> dict[str, Any]:
    """As ours and vLLM's engines call them."""
    return {
        "max_num_seqs": max(batch for batch, _ in given.rows),
        "max_num_batched_tokens": given.budget,
        "max_model_len": max(prompt for _, prompt in given.rows) + more_tokens,
    }


def write_results(lines: list[str], rows: list[Row], given: argparse.Namespace) -> None:
    """The table, printed and where ``--out`` says, and its rows where ``--json`` does."""
    print("\n".join(lines))
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    if given.json is not None:
        given.json.write_text(json.dumps([row.as_dict() for row in rows], indent=2) + "\n")


def parse_rows(text: str) -> list[tuple[int, int]]:
    """``8x1024,1x8192``."""
    pairs = [row.split("x") for row in text.split(",")]
    return [(int(batch), int(prompt)) for batch, prompt in pairs]
