"""The rdma transport over perftest's tools of the same run, and its instructions per block.

``python benchmarks/rdma.py`` measures between two devices of this host (``RDMA_DEVICES``); where it
has none, in the guest of ``tests/rdma_vm`` (emulation: only ratios and counts mean anything).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import RegionRef, Slices, missing
from cloverinfer.transport.rdma import RdmaEndpoint

ROOT = Path(__file__).parents[1]
POST, PING = ROOT / "build/bench/rdma_post", ROOT / "build/bench/rdma_ping"
SOURCES = ["csrc/tcp/loop.cpp", "csrc/shm/bell.cpp"]
DEVICES = os.environ.get("RDMA_DEVICES", "rx0,rx1").split(",")
MEGABYTE, PAGE = 1 << 20, 4096
SPIN_US = 1_000_000
WARM = 5
IN_FLIGHT = 8
PATIENCE = 60.0
Row = dict[str, object]


def build() -> None:
    """The programs without Python; outside the guest, where compiling is slow."""
    POST.parent.mkdir(parents=True, exist_ok=True)
    sources = [*SOURCES, *map(str, sorted((ROOT / "csrc/verbs").glob("*.cpp")))]
    for program in (POST, PING):
        options = ["-std=c++17", "-O2", "-Icsrc", f"benchmarks/_{program.name}.cpp", *sources]
        command = ["c++", *options, "-libverbs", "-pthread", "-o", program]
        subprocess.run(command, cwd=ROOT, check=True, timeout=600)


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


class End:
    """An endpoint on a device, with a region, and ranges to the other end's."""

    def __init__(self, device: str, nbytes: int, **fields: object) -> None:
        network = NetworkConfig(rdma_device=device, secret="benchmark", **fields)
        self.endpoint = RdmaEndpoint(device, network)
        self.region = self.endpoint.register(nbytes)
        self.index = np.zeros((1, 2), np.int32)

    def meet(self, there: RegionRef) -> None:
        at = np.zeros(1, np.int64)
        slices = Slices(self.region, at, there.nbytes), Slices(there, at, there.nbytes)
        peer = self.endpoint.connect(there.address)
        self.ranges = self.endpoint.prepare(peer, *slices)

    def put(self, notice: int) -> None:
        self.endpoint.put(self.ranges, self.index, notice)

    def wait(self) -> None:
        """For one notice."""
        deadline = time.monotonic() + PATIENCE
        while not self.endpoint.poll(1.0).notices:
            assert time.monotonic() < deadline


def bandwidth(puts: int) -> float:
    """MB/s (2^20) of puts of 1 MB, so many in flight, until the peer's card has them all."""
    target, source = (End(device, MEGABYTE) for device in DEVICES)
    source.meet(target.region.ref)
    begun, done = 0.0, -IN_FLIGHT  # the first ones warm up
    started = 0
    while done < puts:
        while started - done - IN_FLIGHT < IN_FLIGHT and started < puts + IN_FLIGHT:
            source.put(started)
            started += 1
        done += len(source.endpoint.poll(PATIENCE).tickets)
        if done >= 0 and not begun:
            begun, counted = time.perf_counter(), done
    seconds = time.perf_counter() - begun
    source.endpoint.close()
    target.endpoint.close()
    return (puts - counted) / seconds


def latency(rounds: int) -> float:
    """Microseconds one way, half a round trip of a put of 4 KB with its notice, at the median;
    between two processes, as perftest's are."""
    here, there = multiprocessing.Pipe()
    other = multiprocessing.get_context("fork").Process(target=echo, args=(there, rounds))
    other.start()
    try:
        end = met(here, DEVICES[0])
        times = []
        for number in range(rounds + WARM):
            begun = time.perf_counter()
            end.put(number)
            end.wait()
            times.append((time.perf_counter() - begun) / 2)
        here.send(None)
        end.endpoint.close()
        other.join(PATIENCE)
        assert other.exitcode == 0
    finally:
        other.kill()
    return statistics.median(times[WARM:]) * 1e6


def echo(pipe: Connection, rounds: int) -> None:
    """The other process of ``latency``."""
    end = met(pipe, DEVICES[1])
    for number in range(rounds + WARM):
        end.wait()
        end.put(number)
    assert pipe.poll(PATIENCE)
    end.endpoint.close()


def met(pipe: Connection, device: str) -> End:
    """An end that knows the one at the other end of ``pipe``."""
    end = End(device, PAGE, rdma_spin_us=SPIN_US)
    pipe.send(end.region.ref)
    assert pipe.poll(PATIENCE)
    end.meet(pipe.recv())
    return end


def native_latency(how: str, rounds: int) -> float:
    """The same without Python: ``engine``, or ``bare`` verbs."""
    command = [PING, how, str(rounds), *DEVICES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return float(done.stdout)


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
    puts, times = (24, 200) if quick else (48, 1000)
    sizes = ("-s", str(MEGABYTE), "-n", str(puts), "-t", str(IN_FLIGHT))
    ours = [(perftest("ib_write_bw", *sizes), bandwidth(puts)) for _ in range(rounds)]
    rows = [row("put of 1 MB", "MB/s", "ib_write_bw", ours)]
    sizes = ("-s", str(PAGE), "-n", str(times))
    ways = {
        "bare verbs": lambda: native_latency("bare", times),
        "the engine": lambda: native_latency("engine", times),
        "endpoints in Python": lambda: latency(times),
    }
    runs = [
        (perftest("ib_write_lat", *sizes), [measured() for measured in ways.values()])
        for _ in range(rounds)
    ]
    for i, name in enumerate(ways):
        both = [(theirs, ours[i]) for theirs, ours in runs]
        rows.append(row(f"put of 4 KB one way, {name}", "us", "ib_write_lat", both))
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
    if not (POST.exists() and PING.exists()):
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
