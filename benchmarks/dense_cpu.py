"""The dense half of decode on a CPU, without attention: a step's stages and logits over the floor.

The floor of a step is the longer of its weight bytes over the read bandwidth and its operations
over the peak, both measured in the same run. The peer is the same model through PyTorch, with its
weights packed for oneDNN. Both run in turn and the fastest of many steps counts, so that other load
on the machine weighs little.

    python benchmarks/dense_cpu.py --threads 2
"""

from __future__ import annotations

import argparse
import time
from unittest import mock

import msgspec
import torch

from _common import Row, describe_run, finish, model_parser, peak_flops, read_bandwidth
from cloverinfer import ModelConfig
from cloverinfer.models import DenseHalf, llama, load_half, resolve_model

STEPS = 5
"""Steps of one engine in a row."""
SETTLE = 0.02
"""Seconds after which the other engine's threads no longer wait awake for its next product."""


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
    quantized = msgspec.structs.replace(config, quantization=args.quantization)
    native, peer = load(quantized, True), load(config, False)
    print(describe_run(args.threads))
    bandwidth = read_bandwidth(args.threads)
    peak = peak_flops(args.threads, torch.bfloat16)
    best = {(half, batch): float("inf") for half in (native, peer) for batch in args.batches}
    for _ in range(args.repeats // STEPS):
        for half, batch in best:
            time.sleep(SETTLE)
            best[half, batch] = min(best[half, batch], *(step(half, batch) for _ in range(STEPS)))
        bandwidth = max(bandwidth, read_bandwidth(args.threads))
    print(f"read bandwidth {bandwidth / 1e9:.1f} GB/s, weights {native.weight_bytes / 1e6:.0f} MB")
    print(f"peak of large products {peak / 1e9:.0f} GFLOP/s")
    rows = []
    for batch in args.batches:
        # A multiply-add (2 operations) for every two bytes of bfloat16 weights and token.
        floor = batch / max(native.weight_bytes / bandwidth, batch * peer.weight_bytes / peak)
        ours, theirs = batch / best[native, batch], batch / best[peer, batch]
        rows.append(Row("dense half", ours, "tokens/s", {"batch": batch}, floor, "torch", theirs))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
