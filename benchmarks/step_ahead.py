"""Decode with each step sent while the one before it is computed, and without.

Settings take turns, round after round, since a machine that others share drifts: what counts is the
ratio within a round. On GPUs the host works behind a step; on CPUs it takes cores from it.

    python benchmarks/step_ahead.py --rounds 5
"""

from __future__ import annotations

import argparse
from statistics import median

from _common import Row, describe_run, finish, model_parser
from cloverinfer import ModelConfig
from cloverinfer.models import resolve_model
from decode_cpu import ours


def arguments() -> argparse.Namespace:
    made = model_parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--executors", nargs="+", default=["local", "process"])
    made.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    made.add_argument("--prompt-tokens", type=int, default=64)
    made.add_argument("--tokens", type=int, default=96)
    args = made.parse_args()
    if args.quick:
        args.rounds, args.executors = 1, ["local"]
    return args


def main() -> None:
    args = arguments()
    model = ModelConfig(model_path=args.model, dtype=args.dtype, quantization=args.quantization)
    dtype = resolve_model(model).dtype
    print(describe_run(args.threads))
    rates: dict[tuple[str, int, bool], list[float]] = {}
    for _ in range(args.rounds):
        for executor in args.executors:
            for ahead in (False, True):
                fields = {"topology": "colocated", "executor": executor, "async_scheduling": ahead}
                for batch, window in ours(args, model, **fields).items():
                    rate = window.tokens / (window.end - window.begin)
                    rates.setdefault((executor, batch, ahead), []).append(rate)
    rows = []
    for executor in args.executors:
        for batch in args.batches:
            off, on = rates[executor, batch, False], rates[executor, batch, True]
            params = {"executor": executor, "batch": batch, "dtype": dtype}
            gain = median(mine / theirs for mine, theirs in zip(on, off, strict=True))
            rows.append(Row("decode", median(off), "tokens/s", params))
            rows.append(Row("decode, steps ahead", median(on), "tokens/s", params))
            rows.append(Row("ahead / not", gain, "ratio", params))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
