"""A decode step on a CPU with its layers in native code and in Python, in one node and split.

Settings take turns, round after round, since a machine that others share drifts: what counts is a
ratio within a round. Prints the median over rounds of each step and of its ratio to the colocated
step of the same round, and how many layers ran without Python.

    python benchmarks/layer_loop.py --rounds 5
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from _common import Row, describe_run, finish, model_parser
from _others import doubt
from cloverinfer import ModelConfig
from cloverinfer.models import resolve_model
from decode_cpu import Window, breakdown, ours

SETTINGS: dict[str, dict[str, Any]] = {
    "colocated": {"topology": "colocated", "executor": "local"},
    "pda local": {"topology": "pda", "executor": "local"},
    "pda process": {"topology": "pda", "executor": "process"},
}
LOOPS = ("auto", "python")
Key = tuple[str, str, int]
"""Setting, loop, batch."""


def arguments() -> argparse.Namespace:
    made = model_parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    made.add_argument("--prompt-tokens", type=int, default=128)
    made.add_argument("--tokens", type=int, default=192)
    args = made.parse_args()
    if args.quick:
        args.rounds, args.batches = 1, [1]
    return args


def native_share(window: Window) -> float:
    """Layers that ran without Python, of all that ran."""
    native = sum(
        after["native_layers"] - before["native_layers"]
        for before, after in zip(window.before, window.after, strict=True)
        if after["role"] in ("dense", "colocated")
    )
    steps = sum(
        after["steps"] - before["steps"]
        for before, after in zip(window.before, window.after, strict=True)
        if after["role"] in ("dense", "colocated")
    )
    return native / max(1, steps)


def main() -> None:
    args = arguments()
    model = ModelConfig(model_path=args.model, dtype=args.dtype, quantization=args.quantization)
    resolved = resolve_model(model)
    print(describe_run(args.threads))
    steps: dict[Key, list[float]] = {}
    native: dict[Key, float] = {}
    for _ in range(args.rounds):
        for name, fields in SETTINGS.items():
            for loop in LOOPS:
                for batch, window in ours(args, model, layer_loop=loop, **fields).items():
                    steps.setdefault((name, loop, batch), []).append(breakdown(window)["step"])
                    native[name, loop, batch] = native_share(window)
                    if doubt(window.others):
                        print(f"{name}, {loop}, batch {batch}: {doubt(window.others)}")
    rows = []
    for (name, loop, batch), times in steps.items():
        params = {"setting": name, "loop": loop, "batch": batch, "dtype": resolved.dtype}
        beside = steps["colocated", loop, batch]
        ratio = median(mine / theirs for mine, theirs in zip(times, beside, strict=True))
        rows.append(Row("step", median(times), "ms", params))
        rows.append(Row("step / colocated step", ratio, "ratio", params))
        rows.append(Row("native layers a step", native[name, loop, batch], "layers", params))
        if loop == "auto":
            python = steps[name, "python", batch]
            gain = median(slow / fast for slow, fast in zip(python, times, strict=True))
            rows.append(Row("python loop / native loop", gain, "ratio", params))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
