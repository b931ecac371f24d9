"""A transfer between the vLLM connector's two worker halves, without vLLM: what Python costs it.

Two processes with caches of SmolLM2-135M's shape in float32. Prefill has computed all when decode
comes, so that the transfer waits for nothing, from decode's grant to the last byte; both threads
that step sleep, or compute in Python as vLLM's do, holding the interpreter. Beside it the same with
a put of its own for every layer, and the transport's own puts. Needs no vLLM.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from _common import Row, describe_run, finish, parser

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests import vllm_kit

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint
from cloverinfer.transport.shm import ShmEndpoint
from cloverinfer.transport.tcp import TcpEndpoint
from cloverinfer.verify.near import Exchange, second_process

LAYERS, HEADS, DIM, BLOCK = 30, 3, 64, 128
BUSY_SECONDS = 0.01
"""Of Python between two steps."""


class Blank(vllm_kit.HostMemory):
    """Nothing is computed."""

    def make(self, shape: tuple[int, ...]) -> Any:
        return np.ones(shape, np.float32)

    def write(self, *args: Any) -> None:
        """What is there will do."""


def engine(role: str, transport: str, port: int) -> vllm_kit.FakeEngine:
    vllm_kit.LAYERS, vllm_kit.ALL_HEADS, vllm_kit.DIM = LAYERS, HEADS, DIM
    options = {"size": BLOCK, "blocks": 64, "opaque": True, "memory": Blank(), "lease": 30.0}
    return vllm_kit.FakeEngine(role, kv_port=port, transport=transport, **options)


def between_steps(busy: bool) -> None:
    if not busy:
        time.sleep(1e-3)
        return
    end = time.perf_counter() + BUSY_SECONDS
    while time.perf_counter() < end:
        pass


def step_until(one: vllm_kit.FakeEngine, names: set[str], name: str, busy: bool) -> None:
    while name not in names:
        between_steps(busy)
        one.step()


def decode(transport: str, port: int, tokens: int, count: int, busy: bool) -> None:
    """The second process: tells of each transfer's seconds."""
    with contextlib.closing(engine("decode", transport, port)) as one:
        print("ready", flush=True)
        for i in range(count):
            sys.stdin.readline()
            one.wait_for_remote(f"d{i}", tokens, f"t{i}")
            step_until(one, one.loaded, f"d{i}", busy)
            print(one.finish(f"d{i}")["transfer_seconds"], flush=True)
            one._free += one.tables.pop(f"d{i}")


def median(transport: str, tokens: int, count: int, busy: bool) -> float:
    """Seconds; the first transfer is for meeting."""
    port = vllm_kit.free_port(2)
    words = ["--decode", transport, port + 1, tokens, count + 1, int(busy)]
    command = [sys.executable, __file__, *map(str, words)]
    pipe = subprocess.PIPE
    found = []
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            other.stdout.readline()
            with contextlib.closing(engine("prefill", transport, port)) as one:
                for i in range(count + 1):
                    place = {"transfer_id": f"t{i}", "decode_address": f"127.0.0.1:{port + 1}"}
                    one.prefill(f"p{i}", tokens, place)
                    one.finish(f"p{i}")
                    other.stdin.write("\n")
                    step_until(one, one.sent, f"p{i}", busy)
                    one._free += one.tables.pop(f"p{i}")
                    found.append(float(other.stdout.readline()))
            other.wait(vllm_kit.PATIENCE)
        finally:
            other.kill()
    return statistics.median(found[1:])


@contextlib.contextmanager
def one_by_one() -> Any:
    """Each layer is put by itself."""
    kept = ShmEndpoint.put_many, TcpEndpoint.put_many
    ShmEndpoint.put_many = TcpEndpoint.put_many = Endpoint.put_many  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShmEndpoint.put_many, TcpEndpoint.put_many = kept  # type: ignore[method-assign]


def own_seconds(transport: str, nbytes: int) -> float:
    """Of the transport's puts of as many bytes, one after the other, nothing beside them."""
    network, put = NetworkConfig(), nbytes // LAYERS
    with second_process(network, network, "tcp") as near:
        with Exchange(near, transport, network, 2 * put) as exchange:
            return nbytes / exchange.bandwidth(put, BLOCK * 2 * HEADS * DIM * 4, 60)


def main() -> None:
    if sys.argv[1:2] == ["--decode"]:
        transport, *numbers = sys.argv[2:]
        port, tokens, count, busy = map(int, numbers)
        decode(transport, port, tokens, count, bool(busy))
        return
    made = parser(__doc__ or "")
    made.add_argument("--tokens", type=int, default=8 * BLOCK + 1)
    made.add_argument("--transfers", type=int, default=11)
    made.add_argument("--transports", nargs="+", default=["shm", "tcp"], choices=("shm", "tcp"))
    args = made.parse_args()
    count = 3 if args.quick else args.transfers
    print(describe_run(2))
    nbytes = args.tokens * LAYERS * 2 * HEADS * DIM * 4
    rows = []
    for transport in args.transports:
        floor = 1e3 * own_seconds(transport, nbytes)
        for busy in (False, True):
            with one_by_one():
                before = 1e3 * median(transport, args.tokens, count, busy)
            found = 1e3 * median(transport, args.tokens, count, busy)
            params = {"transport": transport, "engines": "compute" if busy else "sleep"}
            rows.append(Row("transfer", found, "ms", params, floor, "a put per layer", before))
    finish(rows, args.json)


if __name__ == "__main__":
    main()
