"""What splitting prefill off costs a vLLM server's first token, with our connector and vLLM's own.

For each pair: TTFT at the client, split into prefill (its own answer with one token), the first
decode (the same request at decode with its prompt cached, all but the last token), and what is
left: the transfer exposed. Beside it TTFT of one server alone. Medians; needs ``make test-vllm``'s
environment. Pairs run one after the other, so that each has the machine to itself.
"""

from __future__ import annotations

import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path

from tests.vllm_kit import free_port
from tests.vllm_servers import model_folder

from _common import Row, describe_run, finish, parser
from _vllm import PYTHON, Clover, Nixl, body_of, first_token, running
from cloverinfer.config.cluster import ModelConfig
from cloverinfer.config.network import NetworkConfig
from cloverinfer.models import resolve_model
from cloverinfer.verify.near import Exchange, second_process

BLOCK = 128
"""vLLM's block size on CPUs."""
TOKEN_BYTES = 30 * 3 * 2 * 64 * 4
"""Of SmolLM2-135M's cache in float32, all layers."""
LAYERS, HEADS_BYTES = 30, 3 * 2 * 64 * 4


def measure(pair: Clover | Nixl, prompts: list[list[int]]) -> dict[str, float]:
    """Medians in seconds; the first prompt is for warming up."""
    with running(pair.prefill, pair.decode):
        asked, again, alone, transfers = [], [], [], []
        for prompt in prompts:
            asked.append(pair.ask(prompt))
            again.append(first_token(pair.decode, body_of(prompt, 1)))
            fresh = [token + 1 for token in prompt]
            alone.append(first_token(pair.prefill, body_of(fresh, 1)))
            if isinstance(pair, Clover):
                transfers.append(pair.transfer([token + 2 for token in prompt]))
    rest = [one.first - one.prefill - more for one, more in zip(asked, again, strict=True)][1:]
    return {
        "ttft": statistics.median(one.first for one in asked[1:]),
        "prefill": statistics.median(one.prefill for one in asked[1:]),
        "first decode": statistics.median(again[1:]),
        "exposed": statistics.median(rest),
        "alone": statistics.median(alone[1:]),
        "transfer": statistics.median(transfers[1:]) if transfers else 0.0,
    }


def own_bandwidth(transport: str, nbytes: int) -> float:
    """Bytes per second of the transport's puts in pieces of the same size, nothing beside it."""
    network, put = NetworkConfig(), nbytes // LAYERS
    with second_process(network, network, "tcp") as near:
        with Exchange(near, transport, network, 2 * put) as exchange:
            return exchange.bandwidth(put, BLOCK * HEADS_BYTES, 60)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--tokens", type=int, default=8 * BLOCK + 1, help="of each prompt")
    made.add_argument("--prompts", type=int, default=7)
    made.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=("shm", "tcp"))
    made.add_argument("--no-nixl", action="store_true", help="without vLLM's NixlConnector")
    args = made.parse_args()
    if not PYTHON.exists():
        print("vLLM is not installed (make test-vllm installs it): nothing to measure")
        return
    if args.quick:
        args.transports, args.prompts, args.no_nixl = args.transports[:1], 2, True
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with this
    print(describe_run(1))
    draw = random.Random(0)
    prompts = [
        [draw.randrange(1000, 30000) for _ in range(args.tokens)] for _ in range(args.prompts + 1)
    ]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as here:
        folder = model_folder(resolve_model(ModelConfig(dtype="float32")).path, Path(here) / "m")
        exposed = None
        if not args.no_nixl:
            found = measure(Nixl(folder, free_port(4)), prompts)
            exposed = found["exposed"]
            rows += rows_of("NixlConnector", found, args.tokens, None)
        for transport in args.transports:
            found = measure(Clover(folder, free_port(4), transport), prompts)
            rows += rows_of(transport, found, args.tokens, exposed)
            nbytes = args.tokens * TOKEN_BYTES
            rate = nbytes / found["transfer"] / 1e9
            floor = own_bandwidth(transport, nbytes) / 1e9
            rows.append(Row("transfer", rate, "GB/s", {"connector": transport}, floor=floor))
    finish(rows, args.json)


def rows_of(name: str, found: dict[str, float], tokens: int, peer: float | None) -> list[Row]:
    params = {"connector": name, "tokens": tokens}
    alone = 1e3 * found["alone"]
    parts = [Row(key, 1e3 * found[key], "ms", params) for key in ("prefill", "first decode")]
    exposed = Row("exposed", 1e3 * found["exposed"], "ms", params)
    if peer is not None:
        exposed.peer, exposed.peer_value = "NixlConnector", 1e3 * peer
    whole = Row("ttft", 1e3 * found["ttft"], "ms", params, peer="one server", peer_value=alone)
    return [whole, *parts, exposed]


if __name__ == "__main__":
    main()
