"""Prefill on a CPU: prompt tokens per second through the live scheduler, beside peers.

Timed from submission to the first token of one prompt; the fastest of several prompts, none of
which a prefix cache knows. The floor is the larger of weights over read bandwidth and operations
over the measured peak.
"""

from __future__ import annotations

import argparse

import torch

from _common import Row, describe_run, finish, model_parser, peak_flops, read_bandwidth
from _peers import all_peers, peer_dtype, prompts, run_peer
from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.models import ResolvedModel, resolve_model

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def ours(
    args: argparse.Namespace, model: ModelConfig, topology: str, inputs: list[list[int]]
) -> float:
    """Seconds of the fastest prompt."""
    with LLM(model, topology=topology, threads=args.threads, enable_prefix_caching=False) as llm:
        llm.generate([inputs[0]], ONE)
        return min(llm.generate([prompt], ONE)[0].metrics["ttft"] for prompt in inputs)


def floor_seconds(model: ResolvedModel, weight_bytes: int, length: int, threads: int) -> float:
    """Operations: two per weight and token (the LM head for one token only), and attention's."""
    arch, dtype = model.arch, getattr(torch, model.dtype)
    head = arch.vocab_size * arch.hidden_size
    weights = weight_bytes / dtype.itemsize - head
    attention = 2 * arch.num_layers * arch.num_heads * arch.head_dim * length**2
    operations = 2 * weights * length + 2 * head + attention
    return max(weight_bytes / read_bandwidth(threads), operations / peak_flops(threads, dtype))


def main() -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    made.add_argument("--prompts", type=int, default=4, help="prompts of each length")
    args = made.parse_args()
    if args.quick:
        args.lengths, args.prompts = args.lengths[:1], 2
    config = ModelConfig(model_path=args.model, dtype=args.dtype, quantization=args.quantization)
    model = resolve_model(config)
    print(describe_run(args.threads))
    with LLM(config, topology="colocated", threads=args.threads) as llm:
        weight_bytes = llm.engine.nodes()[0]["weight_bytes"]
    rows = []
    for length in args.lengths:
        inputs = prompts(model, args.prompts, length)
        floor = length / floor_seconds(model, weight_bytes, length, args.threads)
        peers = {}
        for peer in all_peers(args.peer):
            result = run_peer(peer, model, inputs[:1], 1, args)
            peers[peer.partition("=")[0]] = result["prefill_tokens_per_second"]
        params = {"tokens": length, "dtype": model.dtype}
        for topology in ("colocated", "pd", "pda"):
            rate = length / ours(args, config, topology, inputs)
            for peer, value in peers.items():
                rows.append(
                    Row(
                        "prefill",
                        rate,
                        "tokens/s",
                        {"topology": topology} | params,
                        floor,
                        peer,
                        value,
                    )
                )
        rows += [
            Row(
                f"prefill {peer}",
                value,
                "tokens/s",
                {"tokens": length, "dtype": peer_dtype(peer, model, args)},
                floor,
            )
            for peer, value in peers.items()
        ]
    finish(rows, args.json)


if __name__ == "__main__":
    main()
