"""The rdma transport over perftest's tools of the same run, and its instructions per block.

``python benchmarks/rdma.py`` measures between two devices of this host (``RDMA_DEVICES``); where it
has none, in the guest of ``tests/rdma_vm`` (emulation: only ratios and counts mean anything).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Endpoint, Slices, missing
from cloverinfer.transport.rdma import RdmaEndpoint

ROOT = Path(__file__).parents[1]
POST = ROOT / "build/bench/rdma_post"
SOURCES = ["benchmarks/_rdma_post.cpp", "csrc/tcp/loop.cpp", "csrc/shm/bell.cpp"]
DEVICES = os.environ.get("RDMA_DEVICES", "rx0,rx1").split(",")
MEGABYTE, PAGE = 1 << 20, 4096
IN_FLIGHT = 8
PATIENCE = 60.0
Row = dict[str, object]


def build() -> None:
    """The program whose instructions are counted; outside the guest, where compiling is slow."""
    POST.parent.mkdir(parents=True, exist_ok=True)
    sources = [*SOURCES, *map(str, sorted((ROOT / "csrc/verbs").glob("*.cpp")))]
    command = ["c++", "-std=c++17", "-O2", "-Icsrc", *sources, "-libverbs", "-pthread"]
    subprocess.run([*command, "-o", POST], cwd=ROOT, check=True, timeout=600)


def perftest(tool: str, *options: str) -> float:
    """What the tool prints between the devices: MB/s on average, or us one way at the median."""
    base = [tool, "-F", "-m", "4096", *options]
    server = subprocess.Popen([*base, "-d", DEVICES[0]], stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        command = [*base, "-d", DEVICES[1], "127.0.0.1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert server.wait(PATIENCE) == done.returncode == 0, done.stdout + done.stderr
    finally:
        server.kill()
        server.wait()
    lines = [line.split() for line in done.stdout.splitlines() if re.match(r"\s*\d+\s+\d+\s", line)]
    # size, iterations, then: peak and average (bandwidth), or least, most, typical (latency)
    return float(lines[-1][3 if tool.endswith("bw") else 4])


class Lane:
    """Endpoints of both devices in this process, with a region each and ranges both ways."""

    def __init__(self, nbytes: int, **fields: object) -> None:
        self.ends: list[Endpoint] = [
            RdmaEndpoint(name, NetworkConfig(rdma_device=name, **fields)) for name in DEVICES
        ]
        regions = [end.register(nbytes) for end in self.ends]
        at, self.ranges = np.zeros(1, np.int64), []
        for here, there in ((0, 1), (1, 0)):
            peer = self.ends[here].connect(self.ends[there].address())
            slices = Slices(regions[here], at, nbytes), Slices(regions[there].ref, at, nbytes)
            self.ranges.append(self.ends[here].prepare(peer, *slices))
        self.index = np.zeros((1, 2), np.int32)

    def put(self, end: int, notice: int) -> None:
        self.ends[end].put(self.ranges[end], self.index, notice)

    def wait(self, end: int) -> None:
        """For one notice."""
        deadline = time.monotonic() + PATIENCE
        while not self.ends[end].poll(1.0).notices:
            assert time.monotonic() < deadline

    def close(self) -> None:
        for end in self.ends:
            end.close()


def bandwidth(puts: int) -> float:
    """MB/s (2^20) of puts of 1 MB, so many in flight, until the peer's card has them all."""
    lane = Lane(MEGABYTE)
    begun, done = 0.0, -IN_FLIGHT  # the first ones warm up
    started = 0
    while done < puts:
        while started - done - IN_FLIGHT < IN_FLIGHT and started < puts + IN_FLIGHT:
            lane.put(1, started)
            started += 1
        done += len(lane.ends[1].poll(PATIENCE).tickets)
        if done >= 0 and not begun:
            begun, counted = time.perf_counter(), done
    seconds = time.perf_counter() - begun
    lane.close()
    return (puts - counted) / seconds


def latency(rounds: int) -> float:
    """Microseconds one way, half a round trip of a put of 4 KB with its notice, at the median."""
    lane = Lane(PAGE, rdma_spin_us=1_000_000)
    times = []
    for number in range(rounds):
        begun = time.perf_counter()
        lane.put(0, number)
        lane.wait(1)
        lane.put(1, number)
        lane.wait(0)
        times.append((time.perf_counter() - begun) / 2)
    lane.close()
    return statistics.median(times) * 1e6


def instructions(how: str, blocks: int) -> int:
    """Of the whole program, counted by callgrind; libraries and all threads included."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", str(POST)]
    done = subprocess.run(
        [*command, how, str(blocks), *DEVICES], capture_output=True, text=True, timeout=300
    )
    match = re.search(r"Collected : (\d+)", done.stderr)
    assert done.returncode == 0, done.stderr
    assert match, done.stderr
    return int(match[1])


def per_block(how: str) -> float:
    few, many = 64, 320
    return (instructions(how, many) - instructions(how, few)) / (many - few)


def measure(quick: bool, count: bool) -> list[Row]:
    rounds = 1 if quick else 3
    puts, times = (24, 50) if quick else (48, 200)
    sizes = ("-s", str(MEGABYTE), "-n", str(puts), "-t", str(IN_FLIGHT))
    ours = [(perftest("ib_write_bw", *sizes), bandwidth(puts)) for _ in range(rounds)]
    rows = [row("put of 1 MB", "MB/s", "ib_write_bw", ours)]
    sizes = ("-s", str(PAGE), "-n", str(times))
    both = [(perftest("ib_write_lat", *sizes), latency(times)) for _ in range(rounds)]
    rows.append(row("put of 4 KB, one way", "us", "ib_write_lat", both))
    if count and Path("/usr/bin/valgrind").exists():
        counts = [(per_block("bare"), per_block("engine"))]
        rows.append(row("block of 64 KB", "instructions", "bare loop", counts))
    return rows


def row(name: str, unit: str, peer: str, pairs: list[tuple[float, float]]) -> Row:
    theirs, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return {"name": name, "value": ours, "unit": unit, "peer": peer, "peer_value": theirs,
            "ratio_to_peer": ratio}  # fmt: skip


def in_guest(flags: list[str], json_path: Path | None) -> None:
    out = POST.parent / "rdma_guest"  # what the guest writes through to
    rows = out / "rows.json"
    script = ROOT / "tests/rdma_vm/run_in_vm.sh"
    command = [str(script), sys.executable, __file__, *flags, "--json", str(rows)]
    environ = {**os.environ, "RDMA_VM_OUT": str(out)}
    subprocess.run(command, cwd=ROOT, env=environ, timeout=900)
    if json_path and rows.exists():
        rows.replace(json_path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer measurements")
    parser.add_argument("--no-count", action="store_true", help="no instructions, which take long")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="also write the rows to this file"
    )
    arguments = parser.parse_args()
    reason = missing("rdma")
    if not POST.exists():
        build()
    if reason and "no RDMA device" not in reason:
        print(f"rdma is not measured: {reason}")
        return
    if reason:
        print(f"{reason}: measuring in a guest", flush=True)
        in_guest([flag for flag in ("--quick", "--no-count") if flag in sys.argv], arguments.json)
        return
    rows = measure(arguments.quick, not arguments.no_count)
    for one in rows:
        print("| " + " | ".join(
            f"{value:.4g}" if isinstance(value, float) else str(value) for value in one.values()
        ) + " |", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
