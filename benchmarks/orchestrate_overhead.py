"""What the orchestrator costs: CPU per streamed token and per request, and seconds that it adds.

A server over a null engine (``_null_server.py``) is asked directly, then through `cloverinfer
orchestrate`, each a process of its own; the orchestrator's CPU time, all threads included, is read
before and after. The client is not counted. Beside it stands what the server itself spends on the
same load.

    python benchmarks/orchestrate_overhead.py
    python benchmarks/orchestrate_overhead.py --policy prefix_aware
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import psutil

from _common import Row, describe_run, finish, parser
from server_overhead import Client, Server, measure, per_request, serving

PATIENCE = 30.0
"""Seconds until the orchestrator must have found the server."""
SHORT_STEP = 0.0005
"""Seconds between two tokens where one request's latency is measured."""


@contextlib.contextmanager
def orchestrating(server: Server, policy: str) -> Iterator[Server]:
    """An orchestrator with that one instance."""
    instance = f"both=http://{server.host}:{server.port}"
    command = [sys.executable, "-m", "cloverinfer.cli", "orchestrate", "--port", "0", "--quiet"]
    command += ["--disable-log-requests", "--policy", policy, "--instance", instance]
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("ready: "):
            raise SystemExit("the orchestrator did not start")
        host, port = line.strip().removeprefix("ready: http://").split(":")
        _wait(f"http://{host}:{port}/ready")
        yield Server(process, host, int(port))
    finally:
        process.terminate()
        process.wait(30)


def _wait(url: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                json.load(response)
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)


def latency(server: Server, requests: int) -> float:
    """Median milliseconds of a whole request of one token, one at a time on a kept connection."""
    client = Client(server, 1, False)
    times: list[float] = []

    async def run() -> None:
        for _ in range(requests):
            started = time.perf_counter()
            await client.run(1, 1)
            times.append(time.perf_counter() - started)

    asyncio.run(run())
    return statistics.median(times) * 1e3


def rows(server: Server, through: Server, args: argparse.Namespace) -> list[Row]:
    """The orchestrator's figures, each with what the server spends on the same in this run."""
    load = (args.streams, args.tokens, args.rounds)
    own, _ = measure(server, *load)
    token, more = measure(through, *load)
    params = {"policy": args.policy, "streams": args.streams}
    made = [Row("CPU per streamed token", token, "us", {**params, **more})]
    made[0].peer, made[0].peer_value = "the server itself", own
    own = per_request(server, args.streams, args.small)
    request = Row("CPU per request", per_request(through, args.streams, args.small), "us", params)
    request.peer, request.peer_value = "the server itself", own
    return [*made, request]


def added(server: Server, through: Server, args: argparse.Namespace) -> Row:
    """Rounds of the two alternate, so that what disturbs the machine disturbs both."""
    direct, whole = [], []
    for _ in range(5):
        direct.append(latency(server, args.single))
        whole.append(latency(through, args.single))
    before = statistics.median(direct)
    row = Row("latency added to a request", statistics.median(whole) - before, "ms")
    row.params = {"policy": args.policy, "streams": 1, "asked directly, ms": before}
    return row


def arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--policy", default="least_loaded")
    made.add_argument("--streams", type=int, default=64)
    made.add_argument("--tokens", type=int, default=256, help="per stream and round")
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--step-ms", type=float, default=10.0, help="between two tokens of a stream")
    made.add_argument("--small", type=int, default=2000, help="requests of one token")
    made.add_argument("--single", type=int, default=200, help="requests one at a time")
    args = made.parse_args()
    if args.quick:
        args.rounds, args.small, args.single = 1, 500, 50
    return args


def main() -> None:
    args = arguments()
    print(describe_run(2))
    with serving(sys.executable, "_null_server.py", args.step_ms / 1e3) as server:
        with orchestrating(server, args.policy) as through:
            made = rows(server, through, args)
    with serving(sys.executable, "_null_server.py", SHORT_STEP) as server:
        with orchestrating(server, args.policy) as through:
            made.append(added(server, through, args))
    finish(made, args.json)


if __name__ == "__main__":
    main()
