"""Decode on a CPU: tokens per second through the live scheduler, beside peers and over the floor.

Same weights, prompts and threads for every engine of a run. Ours is timed from the moment when all
requests have their first token to the moment when the first one ends; peers by the difference of a
run with all tokens and one with a single token.

    python benchmarks/decode_cpu.py --peer llama.cpp=/path/to/venv/bin/python
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch

from _common import Row, describe_run, finish, model_parser, read_bandwidth
from _others import Cores, doubt
from _peers import all_peers, peer_dtype, prompts, run_peer
from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.models import ResolvedModel, kv_specs, resolve_model

PARTS = ("dense", "attention", "sample", "barrier")


class Window:
    """Tokens and node totals between all first tokens and the first end."""

    def __init__(self, llm: LLM, count: int) -> None:
        self._llm, self._count = llm, count
        self._first: set[int] = set()
        self._left = count
        self.tokens = 0
        self.begin = self.end = 0.0
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self.cores: Cores | None = None
        self.others: float | None = None
        """Share of the cores that other programs took meanwhile."""
        self.done = threading.Event()
        self.error: Exception | None = None

    def take(self, i: int, item: Any) -> None:
        now = time.perf_counter()
        if isinstance(item, Exception):
            self.error = item
            self.done.set()
            return
        if self.before and not self.after:
            self.tokens += len(item.token_ids)
        self._first.add(i)
        if len(self._first) == self._count and not self.before:
            self.begin, self.before = now, self._llm.engine.nodes()
            self.cores = Cores(row["pid"] for row in self.before)
        if item.finish_reason is not None:
            if not self.after:
                self.end, self.after = now, self._llm.engine.nodes()
                self.others = self.cores.share_of_others() if self.cores else None
            self._left -= 1
            if not self._left:
                self.done.set()


def measure(llm: LLM, inputs: list[list[int]], tokens: int) -> Window:
    window = Window(llm, len(inputs))
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for i, prompt in enumerate(inputs):
        llm.engine.submit(prompt, params, lambda item, i=i: window.take(i, item))
    window.done.wait(600)
    if window.error is not None:
        raise window.error
    if not window.begin < window.end:
        raise SystemExit("a request ended before all had their first token: raise --tokens")
    return window


def breakdown(window: Window) -> dict[str, float]:
    """Milliseconds of a step by where they went."""
    delta = dict.fromkeys(PARTS, 0.0)
    steps = 0
    for before, after in zip(window.before, window.after, strict=True):
        if after["role"] == "prefill":
            continue  # its last step may be told of after the tokens that began the window
        for part in PARTS:
            delta[part] += after[f"{part}_seconds"] - before[f"{part}_seconds"]
        if after["role"] in ("dense", "colocated"):
            steps += after["steps"] - before["steps"]
    total = window.end - window.begin
    hop = max(0.0, delta["barrier"] - delta["attention"]) if delta["barrier"] else 0.0
    known = delta["dense"] + delta["attention"] + delta["sample"] + hop
    parts = {
        "step": total,
        "GEMMs": delta["dense"],
        "attention": delta["attention"],
        "hop": hop,
        "sampling": delta["sample"],
        "Python": total - known,
    }
    return {name: 1000 * seconds / max(1, steps) for name, seconds in parts.items()}


def ours(args: argparse.Namespace, model: ModelConfig, **fields: Any) -> dict[int, Window]:
    """Windows by batch; ``fields`` are the cluster's."""
    with LLM(model, threads=args.threads, enable_prefix_caching=False, **fields) as llm:
        resolved = resolve_model(model)
        measure(llm, prompts(resolved, 2, 16), 8)
        return {
            batch: measure(llm, prompts(resolved, batch, args.prompt_tokens), args.tokens)
            for batch in args.batches
        }


def peer_rates(args: argparse.Namespace, model: ModelConfig) -> dict[tuple[str, int], float]:
    resolved = resolve_model(model)
    rates: dict[tuple[str, int], float] = {}
    for batch in args.batches:
        inputs = prompts(resolved, batch, args.prompt_tokens)
        for peer in all_peers(args.peer):
            name = peer.partition("=")[0]
            result = run_peer(peer, resolved, inputs, args.tokens, args)
            rates[name, batch] = result["tokens_per_second"]
    return rates


def arguments() -> argparse.Namespace:
    made = model_parser(__doc__ or "")
    made.add_argument("--executor", default="local")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--tokens", type=int, default=128)
    args = made.parse_args()
    if args.quick:
        args.tokens = min(args.tokens, 32)
    return args


def main() -> None:
    args = arguments()
    model = ModelConfig(model_path=args.model, dtype=args.dtype, quantization=args.quantization)
    resolved = resolve_model(model)
    bandwidth = read_bandwidth(args.threads)
    print(describe_run(args.threads))
    print(f"{resolved.name} {resolved.dtype}; read bandwidth {bandwidth / 1e9:.1f} GB/s")
    windows = {
        topology: ours(args, model, topology=topology, executor=args.executor)
        for topology in ("colocated", "pda")
    }
    rates = peer_rates(args, model)
    weight_bytes = max(row["weight_bytes"] for row in windows["colocated"][args.batches[0]].after)
    rows, steps = [], []
    for batch in args.batches:
        floor = batch * bandwidth / weight_bytes
        with_kv = batch * bandwidth / (weight_bytes + batch * kv_bytes(args, resolved))
        for topology, by_batch in windows.items():
            window = by_batch[batch]
            rate = window.tokens / (window.end - window.begin)
            params = {"topology": topology, "batch": batch, "dtype": resolved.dtype}
            rows.append(
                Row("decode, KV counted", rate, "tokens/s", params, with_kv),
            )
            if doubt(window.others):
                print(f"{topology}, batch {batch}: {doubt(window.others)}")
            for (peer, peer_batch), value in rates.items():
                if peer_batch == batch:
                    rows.append(Row("decode", rate, "tokens/s", params, floor, peer, value))
            steps += [
                Row(f"step: {part}", ms, "ms", params) for part, ms in breakdown(window).items()
            ]
        rows += [
            Row(
                f"decode {peer}",
                value,
                "tokens/s",
                {"batch": batch, "dtype": peer_dtype(peer, resolved, args)},
                floor,
            )
            for (peer, peer_batch), value in rates.items()
            if peer_batch == batch
        ]
        ratio = _step_ms(windows["pda"][batch]) / _step_ms(windows["colocated"][batch])
        rows.append(Row("pda step / colocated step", ratio, "ratio", {"batch": batch}))
    finish(rows + steps, args.json)


def kv_bytes(args: argparse.Namespace, resolved: ResolvedModel) -> float:
    """That a step reads of one request's cache, on average."""
    specs = kv_specs(resolved.arch, resolved.dtype)
    numbers = sum(spec.kv_heads * (spec.k_dim + spec.v_dim) for spec in specs)
    context = args.prompt_tokens + args.tokens / 2
    return context * numbers * getattr(torch, resolved.dtype).itemsize


def _step_ms(window: Window) -> float:
    return breakdown(window)["step"]


if __name__ == "__main__":
    main()
