"""Compiled models: seconds to compile and to load, a step of the compiled dense half over that of
the native one, and the memory that compiling takes over the weights.

    benchmarks/compile.py --dtype float32 --lowering eager --lowering inductor
    benchmarks/compile.py --device cuda                     # Llama-3.1-8B's shapes, random weights

On a GPU a step is captured and replayed, as nodes do it: the goals there are 1.05 of the native
step with inductor, and 1.3 eager.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from _common import Row, best_of, describe_run, finish, model_parser
from _gpu import LLAMA_8B, best_time
from cloverinfer import ModelConfig
from cloverinfer.attention.cuda import missing
from cloverinfer.models import DenseHalf, load_half, resolve_model

ROWS = {"cpu": (1, 8, 64), "cuda": (1, 8, 32, 128)}
"""Tokens of a step."""
_TICK = 0.01
"""Seconds between two looks at the memory."""


def main() -> None:
    parser = model_parser(__doc__ or "")
    parser.add_argument(
        "--lowering", action="append", choices=("eager", "inductor"), help="may be repeated"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--layers", type=int, default=32, help="of the model on a GPU, 3 or more")
    parser.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="run the layers but the outer two N times",
    )
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_here(args)))
        return
    if args.device == "cuda" and missing():
        raise SystemExit(f"nothing measured: {missing()}")
    args.lowering = args.lowering or (["eager"] if args.device == "cpu" else ["eager", "inductor"])
    print(describe_run(args.threads))
    torch.set_num_threads(args.threads)
    with prepared(args):
        rows = [*compiling(args), *stepping(args)]
    finish(rows, args.json)


@contextlib.contextmanager
def prepared(args: Any) -> Iterator[None]:
    """The model is here, and the cache holds nothing compiled."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        cache.mkdir()
        if args.device == "cuda":
            args.model, args.dtype = folder, "bfloat16"
            shape = LLAMA_8B | {"num_hidden_layers": args.layers}
            (Path(folder) / "config.json").write_text(json.dumps(shape))
        else:
            resolve_model(config_of(args, "native"))  # fetched and converted before it is timed
            known = Path(os.environ.get("CLOVER_CACHE", "~/.cache/cloverinfer")).expanduser()
            for path in known.iterdir() if known.is_dir() else ():
                if path.name != "compiled":
                    (cache / path.name).symlink_to(path)
        os.environ["CLOVER_CACHE"] = str(cache)
        # What torch.compile made before is not found again.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder) / "inductor")
        yield


def config_of(args: Any, impl: str, lowering: str = "eager") -> ModelConfig:
    return ModelConfig(
        model_path=args.model,
        dtype=args.dtype,
        model_impl=impl,
        lowering=lowering,
        load_format="dummy" if args.device == "cuda" else "auto",
    )


class Peak:
    """The most memory of this process's own while it is open, in bytes: mapped files, which the
    system takes back at will, are counted apart."""

    def __init__(self) -> None:
        self.own = self.mapped = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(timeout=10)

    def _watch(self) -> None:
        while not self._over.wait(_TICK):
            own, mapped = resident()
            self.own, self.mapped = max(self.own, own), max(self.mapped, mapped)


def resident() -> tuple[int, int]:
    """Bytes of this process in memory: its own, and mapped from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    kib = dict(line.split(":", 1) for line in lines)
    own, mapped = (int(kib[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return own, mapped


def compile_here(args: Any) -> dict[str, float]:
    """In a process of its own, so that its peak of memory is compiling's."""
    import transformers  # noqa: F401 - its own memory is not compiling's

    from cloverinfer.compiler import ensure  # noqa: F401 - nor is that of the compiler's modules

    torch.set_num_threads(args.threads)
    if args.device == "cuda":
        draw_once()
    own, mapped = resident()
    with Peak() as peak:
        started = time.perf_counter()
        model = resolve_model(config_of(args, "compiled"))
        seconds = time.perf_counter() - started
    weights = (model.path / "model.safetensors").stat().st_size
    return {
        "seconds": seconds,
        "own": float(peak.own - own),
        "mapped": float(peak.mapped - mapped),
        "weights": float(weights),
    }


def draw_once() -> None:
    """Random weights from here on repeat some numbers: to draw eight billion takes minutes."""
    numbers = torch.randn(1 << 20)

    def normal_(x: torch.Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> torch.Tensor:
        scaled = (numbers * std + mean).to(x.dtype)
        for part in x.detach().view(-1).split(len(scaled)):
            part.copy_(scaled[: len(part)])
        return x

    torch.Tensor.normal_ = normal_  # type: ignore[method-assign, assignment]
    torch.Tensor.uniform_ = lambda x, *_, **__: normal_(x, 0.0, 0.02)  # type: ignore


def compiling(args: Any) -> list[Row]:
    command = [sys.executable, __file__, "--child", "--model", args.model, "--dtype", args.dtype]
    done = subprocess.run(
        [*command, "--threads", str(args.threads), "--device", args.device],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    made = json.loads(done.stdout.splitlines()[-1])
    print(made, flush=True)
    weights = made["weights"] / 2**20
    return [
        Row("compile", made["seconds"], "s"),
        Row("peak memory over start", made["own"] / 2**20, "MiB", floor=weights),
        Row("mapped files over start", made["mapped"] / 2**20, "MiB", floor=weights),
    ]


def stepping(args: Any) -> list[Row]:
    device = torch.device(args.device)
    native, took = loaded(config_of(args, "native"), device)
    rows = []
    steps = {tokens: step_seconds(native, tokens, args) for tokens in ROWS[args.device]}
    for lowering in args.lowering:
        half, seconds = loaded(config_of(args, "compiled", lowering), device)
        of: dict[str, Any] = {"lowering": lowering, "dtype": str(half.dtype).split(".")[1]}
        rows.append(Row("load", seconds, "s", of, peer="native", peer_value=took))
        for tokens, base in steps.items():
            ms, params = step_seconds(half, tokens, args) * 1e3, of | {"tokens": tokens}
            print(f"{params}: {ms:.4g} ms, native {base * 1e3:.4g}", flush=True)
            rows.append(Row("step", ms, "ms", params, peer="native", peer_value=base * 1e3))
        del half
    return rows


def loaded(config: ModelConfig, device: torch.device) -> tuple[DenseHalf, float]:
    model = resolve_model(config)
    started = time.perf_counter()
    return load_half(model, device=device), time.perf_counter() - started


@torch.inference_mode()
def step_seconds(half: DenseHalf, tokens: int, args: Any) -> float:
    """All stages of one step and its logits; what attention would answer is at hand."""
    device, heads, last = torch.device(args.device), half.arch.num_heads, half.num_layers
    ids, positions = (torch.arange(tokens, device=device) + start for start in (0, 100))
    outs = [
        torch.randn(tokens, heads, spec.v_dim, device=device).to(half.dtype) for spec in half.specs
    ]

    def run() -> torch.Tensor:
        carry, attn_out = None, None
        for i in (0, 1, *list(range(2, last - 1)) * args.repeat, last - 1, last):
            *_, carry = half.stage(i, attn_out, carry, ids if i == 0 else None, positions)
            attn_out = outs[i] if i < last else None
        assert carry is not None
        return half.raw_logits(carry)

    repeats = 3 if args.quick else 15
    return best_of(repeats, run) if device.type == "cpu" else best_time(captured(run), repeats)


def captured(run: Callable[[], Any]) -> Callable[[], None]:
    """Replays ``run``, after one run that loads kernels, which cannot be captured."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        kept = run()

    def replay() -> None:
        assert kept is not None  # what the graph writes to
        graph.replay()

    return replay


if __name__ == "__main__":
    main()
