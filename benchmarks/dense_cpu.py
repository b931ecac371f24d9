"""The dense half of decode on a CPU, without attention: a step's stages and logits over the floor.

The floor of a step is its weight bytes over the read bandwidth measured in the same run. The peer
is the same model through PyTorch's operators with weights packed for oneDNN. Both run in turn and
the fastest of many steps counts, so that other load on the machine weighs little.

    python benchmarks/dense_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import torch

from cloverinfer import ModelConfig
from cloverinfer.models import DenseHalf, llama, load_half, resolve_model
from common import Row, describe_run, finish, model_parser, read_bandwidth


@torch.inference_mode()
def step(half: DenseHalf, batch: int) -> float:
    """Seconds of one decode step of ``batch`` tokens, whose attention gives its queries back."""
    ids = torch.arange(batch) + 100
    positions = torch.arange(batch) + 50
    started = time.perf_counter()
    attended, carry = None, None
    for i in range(half.num_layers):
        attended, _, _, carry = half.stage(i, attended, carry, ids, positions)
    *_, carry = half.stage(half.num_layers, attended, carry, None, positions)
    half.logits(carry)
    return time.perf_counter() - started


def load(config: ModelConfig, native: bool) -> DenseHalf:
    if native:
        return load_half(resolve_model(config))
    with mock.patch.object(llama, "native_serves", return_value=False):
        return load_half(resolve_model(config))


def arguments() -> argparse.Namespace:
    made = model_parser(__doc__ or "")
    made.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    made.add_argument("--repeats", type=int, default=100)
    args = made.parse_args()
    if args.quick:
        args.repeats = min(args.repeats, 20)
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    config = ModelConfig(model_path=args.model, dtype="bfloat16")
    native, peer = load(config, True), load(config, False)
    print(describe_run(args.threads))
    rows = []
    bandwidth = read_bandwidth(args.threads)
    for batch in args.batches:
        times: dict[DenseHalf, list[float]] = {native: [], peer: []}
        for _ in range(args.repeats):
            for half, taken in times.items():
                taken.append(step(half, batch))
        bandwidth = max(bandwidth, read_bandwidth(args.threads))
        best, theirs = (1000 * min(taken) for taken in times.values())
        floor = 1000 * native.weight_bytes / bandwidth
        # Shares of the floor and of the peer's speed: more is better.
        rows.append(Row("dense step", best, "ms", {"batch": batch}, floor, "torch", theirs))
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {native.weight_bytes / 1e6:.0f} MB")
    finish(rows, args.json)


if __name__ == "__main__":
    main()
