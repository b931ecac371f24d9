"""Compiled models: seconds to compile and to load, a step of the compiled dense half over that of
the native one, and the memory that compiling takes over the weights.

    benchmarks/compile.py --model smollm2-135m --dtype float32
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from _common import Row, best_of, describe_run, finish, model_parser
from cloverinfer import ModelConfig
from cloverinfer.models import DenseHalf, load_half, resolve_model

ROWS = (1, 8, 64)
"""Tokens of a step."""


def main() -> None:
    parser = model_parser(__doc__ or "")
    parser.add_argument("--lowering", default="eager", help="eager or inductor")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_here(args)))
        return
    print(describe_run(args.threads))
    torch.set_num_threads(args.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        known = Path(os.environ.get("CLOVER_CACHE", "~/.cache/cloverinfer")).expanduser()
        resolve_model(config_of(args, "native"))  # fetched and converted before anything is timed
        cache = Path(folder)
        for path in known.iterdir() if known.is_dir() else ():
            if path.name != "compiled":
                (cache / path.name).symlink_to(path)
        os.environ["CLOVER_CACHE"] = folder
        rows += compiling(args)
        rows += stepping(args)
    finish(rows, args.json)


def config_of(args: Any, impl: str) -> ModelConfig:
    lowering = args.lowering if impl == "compiled" else "eager"
    return ModelConfig(model_path=args.model, dtype=args.dtype, model_impl=impl, lowering=lowering)


def compile_here(args: Any) -> dict[str, float]:
    """In a process of its own, so that its peak of memory is compiling's."""
    import transformers  # noqa: F401 - its own memory is not compiling's

    from cloverinfer.compiler import ensure  # noqa: F401 - nor is that of the compiler's modules

    torch.set_num_threads(args.threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    model = resolve_model(config_of(args, "compiled"))
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    weights = (model.path / "model.safetensors").stat().st_size
    return {"seconds": seconds, "extra": float(peak - before), "weights": float(weights)}


def compiling(args: Any) -> list[Row]:
    command = [sys.executable, __file__, "--child", "--model", args.model, "--dtype", args.dtype]
    done = subprocess.run(
        [*command, "--threads", str(args.threads)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    made = json.loads(done.stdout.splitlines()[-1])
    return [
        Row("compile", made["seconds"], "s"),
        Row("peak memory over start", made["extra"] / 2**20, "MiB", floor=made["weights"] / 2**20),
    ]


def stepping(args: Any) -> list[Row]:
    halves: dict[str, DenseHalf] = {}
    loaded = {}
    for impl in ("native", "compiled"):
        model = resolve_model(config_of(args, impl))
        started = time.perf_counter()
        halves[impl] = load_half(model)
        loaded[impl] = time.perf_counter() - started
    rows = [Row("load", loaded["compiled"], "s", peer="native", peer_value=loaded["native"])]
    for tokens in ROWS:
        times = {impl: step_seconds(half, tokens, args.quick) for impl, half in halves.items()}
        rows.append(
            Row("step", times["compiled"] * 1e3, "ms", {"tokens": tokens,
                "lowering": args.lowering, "dtype": args.dtype},
                peer="native", peer_value=times["native"] * 1e3)
        )  # fmt: skip
    return rows


@torch.inference_mode()
def step_seconds(half: DenseHalf, tokens: int, quick: bool) -> float:
    """All stages of one step and its logits; what attention would answer is at hand."""
    ids, positions = torch.arange(tokens), torch.arange(tokens) + 100
    heads = half.arch.num_heads
    outs = [torch.randn(tokens, heads, spec.v_dim).to(half.dtype) for spec in half.specs]

    def run() -> torch.Tensor:
        carry, attn_out = None, None
        for i in range(half.num_layers + 1):
            *_, carry = half.stage(i, attn_out, carry, ids if i == 0 else None, positions)
            attn_out = outs[i] if i < half.num_layers else None
        assert carry is not None
        return half.logits(carry)

    return best_of(3 if quick else 15, run)


if __name__ == "__main__":
    main()
