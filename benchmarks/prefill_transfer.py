"""What splitting off prefill costs the first token, and how much of the KV transfer it hides.

For each transport a cluster of topology pd and a colocated one, with the same executor, answer the
same prompts in turn with one token. ``exposed`` is what of the transfer was left when computing had
ended; ``alone`` is the time that the same bytes take in the same pieces while nothing is computed.
Hidden is the share of ``alone`` that is not exposed, and TTFT a ratio of medians.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from _common import Row, describe_run, finish, model_parser
from _peers import prompts
from cloverinfer import LLM, ModelConfig, SamplingParams
from cloverinfer.config.network import NetworkConfig
from cloverinfer.models import resolve_model
from cloverinfer.verify.near import Exchange, second_process

ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
TRANSPORTS = ("inproc", "shm", "tcp")
EXECUTORS = {"inproc": "local"}
"""The others connect processes."""
ALONE_PUTS = 60


@dataclass
class Times:
    """Of each prompt, in seconds; and bytes."""

    split: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    push: list[float] = field(default_factory=list)
    exposed: list[float] = field(default_factory=list)
    nbytes: int = 0
    piece: int = 0
    layers: int = 0


def prefill_row(llm: LLM) -> dict[str, Any]:
    return next(row for row in llm.engine.nodes() if row["role"] == "prefill")


def measure(
    model: ModelConfig, transport: str, inputs: Sequence[list[int]], args: argparse.Namespace
) -> Times:
    """Prompts go to both clusters in turn, so that the machine's moods meet both."""
    shared: dict[str, Any] = {
        "executor": EXECUTORS.get(transport, "process"),
        "threads": args.threads,
        "enable_prefix_caching": False,
        "checksum": args.checksum,
    }
    times = Times()
    with (
        LLM(model, topology="colocated", **shared) as whole,
        LLM(model, topology="pd", transport=transport, **shared) as split,
    ):
        for llm in (whole, split):
            llm.generate([inputs[0]], ONE)
        layout = split.engine._engine.cluster.infos[0].peer.layout
        assert layout is not None
        times.piece, times.layers = layout.layer_block_bytes(0), layout.num_layers
        for prompt in inputs:
            times.whole.append(whole.generate([prompt], ONE)[0].metrics["ttft"])
            before = prefill_row(split)
            times.split.append(split.generate([prompt], ONE)[0].metrics["ttft"])
            after = prefill_row(split)
            times.push.append(after["push_seconds"] - before["push_seconds"])
            times.exposed.append(after["push_wait_seconds"] - before["push_wait_seconds"])
            times.nbytes = after["bytes_out"] - before["bytes_out"]
    return times


def alone(transport: str, times: Times) -> float:
    """Seconds of the same puts while nothing is computed; within a process, those of the sender."""
    if transport in EXECUTORS:
        return statistics.median(times.push)
    network, put = NetworkConfig(), times.nbytes // times.layers
    with second_process(network, network, "tcp") as near:
        with Exchange(near, transport, network, 2 * put) as exchange:
            return times.nbytes / exchange.bandwidth(put, times.piece, ALONE_PUTS)


def main() -> None:
    made = model_parser(__doc__ or "")
    made.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    made.add_argument("--prompts", type=int, default=7, help="prompts of each length")
    made.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    made.add_argument("--checksum", default="none", choices=("none", "crc32c"))
    args = made.parse_args()
    if args.quick:
        args.lengths, args.prompts, args.transports = args.lengths[:1], 3, args.transports[:2]
    config = ModelConfig(model_path=args.model, dtype=args.dtype)
    model = resolve_model(config)
    print(describe_run(args.threads))
    rows = []
    for length in args.lengths:
        inputs = prompts(model, args.prompts, length)
        for transport in args.transports:
            times = measure(config, transport, inputs, args)
            exposed, least = statistics.median(times.exposed), alone(transport, times)
            params = {"transport": transport, "tokens": length, "dtype": model.dtype}
            split, whole = statistics.median(times.split), statistics.median(times.whole)
            rows += [
                Row("hidden", max(0.0, 1 - exposed / least), "share", params),
                Row("exposed", 1e3 * exposed, "ms", params | {"alone ms": round(1e3 * least, 2)}),
                Row("ttft pd", 1e3 * split, "ms", params, peer="colocated", peer_value=1e3 * whole),
            ]
    finish(rows, args.json)


if __name__ == "__main__":
    main()
