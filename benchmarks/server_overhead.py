"""CPU time of the HTTP server per streamed token and per request, with no model behind it.

A server process over a null engine (``_null_server.py``) hands 64 streams a token each every few
milliseconds; its CPU time, all threads included, is read before and after. The client is a process
of its own and is not counted. A long run of requests shows whether memory grows.

    python benchmarks/server_overhead.py
    python benchmarks/server_overhead.py --peer llama.cpp=/path/to/venv/bin/python
    python benchmarks/server_overhead.py --requests 100000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from _common import Row, describe_run, finish, parser

HERE = Path(__file__).parent
PEERS = {"llama.cpp": "_null_llama_cpp.py"}
"""Servers of others over a stub, run by the Python that has them."""
PROMPT = "one two three four five six seven eight"


@dataclass
class Server:
    process: psutil.Popen
    host: str
    port: int

    def cpu(self) -> tuple[float, float]:
        """Seconds of CPU so far, of all threads: all, and the kernel's part."""
        times = self.process.cpu_times()
        return times.user + times.system, times.system

    def rss(self) -> float:
        """MiB of resident memory."""
        return self.process.memory_info().rss / 2**20


@contextlib.contextmanager
def serving(python: str, script: str, step: float) -> Iterator[Server]:
    command = [python, str(HERE / script), "--step", str(step)]
    process = psutil.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        if not line.startswith("ready: "):
            raise SystemExit(f"{script} did not start")
        host, port = line.strip().removeprefix("ready: http://").split(":")
        yield Server(process, host, int(port))
    finally:
        process.terminate()
        process.wait(30)


class Client:
    """Completions over kept connections, read as bytes: it must cost less than the server."""

    def __init__(self, server: Server, tokens: int, stream: bool) -> None:
        body = {"model": "null", "prompt": PROMPT, "max_tokens": tokens, "stream": stream}
        data = json.dumps(body).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self._server = server
        self._request = head.encode() + data
        self._stream = stream
        self.writes = 0
        """Pieces that streamed answers came in, at least."""

    async def run(self, connections: int, requests: int) -> None:
        """``requests`` in all, one at a time on each connection."""
        left = iter(range(requests))
        await asyncio.gather(*(self._connection(left) for _ in range(connections)))

    async def _connection(self, left: Iterator[int]) -> None:
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        for _ in left:
            writer.write(self._request)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            if b" 200 " not in head.split(b"\r\n", 1)[0]:
                raise SystemExit(f"the server answered {head!r}")
            await asyncio.wait_for(self._body(reader, head), 600)
        writer.close()

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> None:
        if not self._stream:
            length = head.lower().split(b"content-length: ", 1)[1].split(b"\r\n", 1)[0]
            await reader.readexactly(int(length))
            return
        tail = b""
        while not tail.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 16)
            if not data:
                raise SystemExit("the server closed a stream early")
            self.writes += 1
            tail = (tail + data)[-16:]


def measure(
    server: Server, streams: int, tokens: int, rounds: int
) -> tuple[float, dict[str, float]]:
    """Microseconds of CPU per streamed token; the kernel's part, and pieces received per token."""
    asyncio.run(Client(server, 16, True).run(streams, streams))
    client = Client(server, tokens, True)
    before = server.cpu()
    asyncio.run(client.run(streams, streams * rounds))
    total = streams * rounds * tokens
    whole, kernel = (after - first for after, first in zip(server.cpu(), before, strict=True))
    return whole / total * 1e6, {
        "of it kernel": kernel / total * 1e6,
        "pieces per token": client.writes / total,
    }


def per_request(server: Server, connections: int, requests: int) -> float:
    """Microseconds of CPU per whole (not streamed) request of one token."""
    client = Client(server, 1, False)
    asyncio.run(client.run(connections, requests // 4))
    before = server.cpu()[0]
    asyncio.run(client.run(connections, requests))
    return (server.cpu()[0] - before) / requests * 1e6


def memory(server: Server, connections: int, requests: int) -> list[float]:
    """MiB of resident memory after each tenth of the requests."""
    series = []
    for i in range(10):
        # Half of them streamed: both ways must give back what they took.
        client = Client(server, 2, i % 2 == 0)
        asyncio.run(client.run(connections, requests // 10))
        series.append(server.rss())
    return series


def rows_of(name: str, server: Server, args: argparse.Namespace) -> list[Row]:
    token, more = measure(server, args.streams, args.tokens, args.rounds)
    params = {"server": name, "streams": args.streams}
    return [
        Row("CPU per streamed token", token, "us", {**params, **more}),
        Row(
            "CPU per request",
            per_request(server, args.streams, args.small),
            "us",
            params,
        ),
    ]


def with_peer(ours: list[Row], peer: str, theirs: list[Row]) -> None:
    for mine, its in zip(ours, theirs, strict=True):
        mine.peer, mine.peer_value = peer, its.value


def arguments() -> argparse.Namespace:
    made = parser(__doc__ or "")
    made.add_argument("--streams", type=int, default=64)
    made.add_argument("--tokens", type=int, default=256, help="per stream and round")
    made.add_argument("--rounds", type=int, default=8)
    made.add_argument("--step-ms", type=float, default=5.0, help="between two tokens of a stream")
    made.add_argument("--small", type=int, default=4000, help="requests of one token")
    made.add_argument("--requests", type=int, default=0, help="requests for the memory series")
    made.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    args = made.parse_args()
    if args.quick:
        args.rounds, args.small = 2, 1000
    return args


def main() -> None:
    args = arguments()
    print(describe_run(2))
    with serving(sys.executable, "_null_server.py", args.step_ms / 1e3) as server:
        rows = rows_of("cloverinfer", server, args)
    if args.requests:
        with serving(sys.executable, "_null_server.py", 0.0005) as server:
            series = memory(server, args.streams, args.requests)
        print("RSS, MiB:", " ".join(f"{one:.1f}" for one in series))
        grown = series[-1] - series[1]
        rows.append(Row("memory grown from 20% to 100%", grown, "MiB", {"n": args.requests}))
    for peer in args.peer:
        name, _, python = peer.partition("=")
        with serving(python, PEERS[name], args.step_ms / 1e3) as server:
            theirs = rows_of(name, server, args)
        with_peer(rows[:2], name, theirs)
        rows += theirs
    finish(rows, args.json)


if __name__ == "__main__":
    main()
