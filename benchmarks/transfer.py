"""Puts between two processes: GB/s and latency of every transport, over the floor of the same run.

The floor of shm is a plain copy in memory with the same threads, that of tcp as many bare sockets,
both measured in turn with the transport; the fastest of some rounds counts for each. The floor of a
latency is the least that can be done: two processes that wake each other, or 4 KB back and forth
over one socket, each side on a core of its own. Peers get the same sizes and pieces, each by its
own fastest call.

    python benchmarks/transfer.py --peer nixl=/path/to/python --peer mooncake=/path/to/python
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from _common import Row, describe_run, finish, parser
from _transfer_floors import MemoryCopy, Sockets, apart
from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import missing
from cloverinfer.verify.near import Exchange, second_process

Floor = MemoryCopy | Sockets
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
PIECES = (64 << 10, 16 << 10)
FLOORS = {"shm": MemoryCopy, "tcp": Sockets, "nixl": MemoryCopy}
"""What a transport is measured against. Transports of device memory bring their own."""
SCRIPTS = {
    "nixl": "_peer_nixl.py",
    "mooncake": "_peer_mooncake.py",
    "ray": "_peer_ray.py",
}
ROUND_BYTES = 256 << 20
"""Bytes of one round of puts of one size, about."""
MOST_PUTS = 500
LATENCY_ROUNDS = 2000
PEER_SECONDS = 3600.0
"""How long all of one peer's figures may take."""
Case = tuple[int, int]
"""Bytes of a put, and of its pieces; equal where it is contiguous."""


def cases(largest: int) -> list[Case]:
    found = []
    for nbytes in (size for size in SIZES if size <= largest):
        found.append((nbytes, nbytes))
        found += [(nbytes, piece) for piece in PIECES if nbytes >= 1 << 20]
    return found


def puts(nbytes: int) -> int:
    return max(1, min(MOST_PUTS, ROUND_BYTES // nbytes))


def measure(
    transport: str, network: NetworkConfig, args: argparse.Namespace
) -> tuple[dict[Case, tuple[float, float]], tuple[float, float], str]:
    """Rates in bytes/s and latencies in seconds, each with its floor; and the floor's name."""
    wide = args.threads if FLOORS[transport] is MemoryCopy else network.tcp_streams
    floor = FLOORS[transport](args.largest, wide)
    rates: dict[Case, tuple[float, float]] = {}
    with contextlib.closing(floor), second_process(network, network, "tcp") as near:
        with Exchange(near, transport, network, args.largest) as exchange:
            for nbytes, piece in cases(args.largest):
                best, least = 0.0, 0.0
                for _ in range(args.rounds):
                    least = max(least, floor.rate(nbytes, puts(nbytes)))
                    best = max(best, exchange.bandwidth(nbytes, piece, puts(nbytes)))
                rates[nbytes, piece] = best, least
            assert near.pid is not None
            pairs = []
            for _ in range(args.rounds):
                with apart(near.pid):
                    seen = exchange.latency(LATENCY_ROUNDS)
                pairs.append((seen.median, floor.latency()))
    # Medians: now and then two sides never come to sleep, which is no wake-up.
    ours, least = (statistics.median(values) for values in zip(*pairs, strict=True))
    return rates, (ours, least), floor.name


def peer_results(peer: str, args: argparse.Namespace) -> dict[str, Any]:
    """``peer`` is ``name=python``; its script prints one JSON object: ``rates`` by
    ``nbytes/piece`` in bytes/s, and ``latency`` in seconds where it has one."""
    name, _, python = peer.partition("=")
    if name not in SCRIPTS or not python:
        raise SystemExit(f"--peer {peer}: want NAME=PYTHON with NAME one of {', '.join(SCRIPTS)}")
    job = {"cases": cases(args.largest), "rounds": args.rounds, "largest": args.largest}
    result = subprocess.run(
        [python, str(Path(__file__).parent / SCRIPTS[name])],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        check=False,
        timeout=PEER_SECONDS,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith('{"rates"')]
    if not lines:
        raise SystemExit(f"{name} failed:\n{result.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def size(nbytes: int) -> str:
    for unit, shift in (("GB", 30), ("MB", 20), ("KB", 10)):
        if nbytes >> shift:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def case_params(case: Case) -> dict[str, Any]:
    return {"size": size(case[0]), "pieces": "whole" if case[0] == case[1] else size(case[1])}


def rows_of(
    transport: str, network: NetworkConfig, args: argparse.Namespace, peers: dict[str, Any]
) -> list[Row]:
    rates, (latency, least), floor = measure(transport, network, args)
    print(f"{transport}: floor {floor}")
    rows = []
    for case, (rate, most) in rates.items():
        beside: list[tuple[str | None, float | None]] = [(None, None)]
        for name, result in peers.items():
            theirs = result["rates"].get(f"{case[0]}/{case[1]}")
            beside += [(name, theirs / 1e9)] if theirs else []
        for name, theirs in beside[1:] or beside:
            row = Row(transport, rate / 1e9, "GB/s", case_params(case), most / 1e9, name, theirs)
            rows.append(row)
    # A latency's floor is the least time: its ratio says how many times as long.
    params = {"size": "4 KB", "pieces": "one way"}
    rows.append(Row(f"{transport} latency", 1e6 * latency, "us", params, 1e6 * least))
    return rows


def peer_rows(name: str, result: dict[str, Any]) -> list[Row]:
    rows = []
    for key, rate in result["rates"].items():
        nbytes, piece = (int(part) for part in key.split("/"))
        rows.append(Row(f"peer {name}", rate / 1e9, "GB/s", case_params((nbytes, piece))))
    if result.get("latency"):
        params = {"size": "4 KB", "pieces": "one way"}
        rows.append(Row(f"peer {name} latency", 1e6 * result["latency"], "us", params))
    return rows


def arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    add = made.add_argument
    add("--transport", action="append", choices=list(FLOORS), help="repeatable (default: all)")
    add("--threads", type=int, default=min(4, len(os.sched_getaffinity(0))))
    add("--rounds", type=int, default=5)
    add("--largest", type=int, default=SIZES[-1], help="bytes of the largest put")
    text = "a peer and the Python that has it: nixl, mooncake, ray"
    add("--peer", action="append", default=[], metavar="NAME=PYTHON", help=text)
    args = made.parse_args()
    if args.quick:
        args.rounds, args.largest = min(args.rounds, 2), min(args.largest, 16 << 20)
    return args


def main() -> None:
    args = arguments()
    network = msgspec.structs.replace(NetworkConfig(), copy_threads=args.threads)
    print(describe_run(args.threads))
    wanted = args.peer if args.quick else [f"ray={sys.executable}", *args.peer]
    peers = {peer.partition("=")[0]: peer_results(peer, args) for peer in wanted}
    rows: list[Row] = []
    for transport in args.transport or FLOORS:
        reason = missing(transport)
        if reason:
            print(f"{transport}: not measured: {reason}")
            continue
        rows += rows_of(transport, network, args, peers)
    for name, result in peers.items():
        rows += peer_rows(name, result)
    finish(rows, args.json)


if __name__ == "__main__":
    main()
