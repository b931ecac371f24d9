"""What splitting prefill off costs a vLLM server's first token, with our connector and vLLM's own.

For each pair: TTFT at the client, split into prefill (its own answer with one token), the first
decode (the same request at decode with its prompt cached, all but the last token), and what is
left: the transfer exposed. Beside it TTFT of one server alone, and the bytes per second of a
transfer that waits for nothing over those of the transport's own puts. Medians; needs ``make
test-vllm``'s environment. Pairs run one after the other, so that each has the machine to itself.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from _common import Row, describe_run, finish, parser
from _vllm import PYTHON, Clover, Nixl, body_of, first_token, free_port, model_folder, running
from cloverinfer.config.cluster import ModelConfig
from cloverinfer.config.network import NetworkConfig
from cloverinfer.models import resolve_model
from cloverinfer.verify.near import Exchange, second_process

BLOCK = 128
"""vLLM's block size on CPUs."""
TOKEN_BYTES = 30 * 3 * 2 * 64 * 4
"""Of SmolLM2-135M's cache in float32, all layers."""
LAYERS, HEADS_BYTES = 30, 3 * 2 * 64 * 4


def measure(pair: Clover | Nixl, prompts: list[list[int]], alone: bool) -> dict[str, float]:
    """Medians in seconds; the first prompt is for warming up. ``alone``: with one server's TTFT."""
    asked, again, single, transfers = [], [], [], []
    for prompt in prompts:
        asked.append(pair.ask(prompt))
        again.append(first_token(pair.decode, body_of(prompt, 1)))
        if isinstance(pair, Clover):
            transfers.append(pair.transfer(prompt))
        if alone:
            single.append(first_token(pair.prefill, body_of([id + 1 for id in prompt], 1)))
    rest = [one.first - one.prefill - more for one, more in zip(asked, again, strict=True)]
    columns = {
        "ttft": [one.first for one in asked],
        "prefill": [one.prefill for one in asked],
        "first decode": again,
        "exposed": rest,
        "transfer": transfers,
        "alone": single,
    }
    return {name: statistics.median(column[1:]) for name, column in columns.items() if column}


def own_bandwidth(transport: str, nbytes: int) -> float:
    """Bytes per second of the transport's puts in pieces of the same size, nothing beside it."""
    network, put = NetworkConfig(), nbytes // LAYERS
    with second_process(network, network, "tcp") as near:
        with Exchange(near, transport, network, 2 * put) as exchange:
            return exchange.bandwidth(put, BLOCK * HEADS_BYTES, 60)


def main() -> None:
    made = parser(__doc__ or "")
    lengths = [2 * BLOCK + 1, 8 * BLOCK + 1]
    made.add_argument("--tokens", type=int, nargs="+", default=lengths, help="of prompts")
    made.add_argument("--prompts", type=int, default=5, help="of each length")
    made.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=("shm", "tcp"))
    made.add_argument("--no-nixl", action="store_true", help="without vLLM's NixlConnector")
    args = made.parse_args()
    if not PYTHON.exists():
        print("vLLM is not installed (make test-vllm installs it): nothing to measure")
        return
    if args.quick:
        args.transports, args.prompts, args.no_nixl = args.transports[:1], 2, True
        args.tokens = args.tokens[:1]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with this
    print(describe_run(1))
    draw = random.Random(0)
    prompts = {
        tokens: [
            [draw.randrange(1000, 30000) for _ in range(tokens)] for _ in range(args.prompts + 1)
        ]
        for tokens in args.tokens
    }
    with tempfile.TemporaryDirectory() as here:
        folder = model_folder(resolve_model(ModelConfig(dtype="float32")).path, Path(here) / "m")
        finish(compare(folder, prompts, args.transports, not args.no_nixl), args.json)


def compare(
    folder: Path, prompts: dict[int, list[list[int]]], transports: list[str], nixl: bool
) -> list[Row]:
    """One pair after the other; ``prompts`` by their length."""
    rows: list[Row] = []
    pairs: list[Clover | Nixl] = [Clover(folder, free_port(4), name) for name in transports]
    if nixl:
        pairs.insert(0, Nixl(folder, free_port(4)))
    alone: dict[int, float] = {}
    peer: dict[int, float] = {}
    for pair in pairs:
        with running(pair.prefill, pair.decode):
            pair.meet(list(range(1000, 1000 + BLOCK + 1)))
            for tokens, some in prompts.items():
                found = measure(pair, some, tokens not in alone)
                alone.setdefault(tokens, found.get("alone", 0.0))
                rows += rows_of(pair.name, found, tokens, alone[tokens], peer.get(tokens))
                if isinstance(pair, Nixl):
                    peer[tokens] = found["exposed"]
                else:
                    rows.append(transfer_row(pair.transport, tokens, found["transfer"]))
    return rows


def transfer_row(transport: str, tokens: int, seconds: float) -> Row:
    nbytes = tokens * TOKEN_BYTES
    floor = own_bandwidth(transport, nbytes) / 1e9
    params = {"connector": transport, "tokens": tokens}
    return Row("transfer", nbytes / seconds / 1e9, "GB/s", params, floor=floor)


def rows_of(
    name: str, found: dict[str, float], tokens: int, alone: float, peer: float | None
) -> list[Row]:
    """``alone``: TTFT of one server; ``peer``: exposed with NixlConnector."""
    params = {"connector": name, "tokens": tokens}
    parts = [Row(key, 1e3 * found[key], "ms", params) for key in ("prefill", "first decode")]
    exposed = Row("exposed", 1e3 * found["exposed"], "ms", params)
    if peer is not None:
        exposed.peer, exposed.peer_value = "NixlConnector", 1e3 * peer
    ttft = 1e3 * found["ttft"]
    whole = Row("ttft", ttft, "ms", params, peer="one server", peer_value=1e3 * alone)
    return [whole, *parts, exposed]


if __name__ == "__main__":
    main()
