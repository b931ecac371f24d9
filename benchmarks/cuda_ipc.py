"""Puts of device memory between two processes on one GPU, over a device copy in the same run.

Rows: bandwidth of puts of 4 KB to 1 GB, whole and in scattered blocks (``how``: what the transport
takes by itself, or the copy engines alone), beside a device-to-device copy of as many bytes in one
process; and half the round trip of a put of 4 KB.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections import deque

import msgspec
import numpy as np
import torch

from _common import Row, describe_run, finish, parser
from cloverinfer.transport import (
    DeviceMemory,
    Endpoint,
    Ranges,
    Region,
    RegionRef,
    Slices,
    Ticket,
    _cuda_lane,
    create_endpoint,
    missing,
)

WINDOW = 16
"""Puts in flight."""
PING = 1 << 20
"""Notices from here on are answered."""
SMALL = 4096
HOST_BYTES = 16 << 20
PATIENCE = 60.0


def device_region(endpoint: Endpoint, nbytes: int) -> tuple[torch.Tensor, Region]:
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    return tensor, endpoint.register(DeviceMemory(tensor.data_ptr(), nbytes, 0))


def child(address: str, nbytes: int) -> None:
    endpoint = create_endpoint("cuda_ipc", "sink")
    tensor, region = device_region(endpoint, nbytes)
    parent = endpoint.connect(address)
    host = endpoint.register(HOST_BYTES)
    endpoint.send(parent, msgspec.msgpack.encode([region.ref, host.ref]))
    ranges = None
    while True:
        events = endpoint.poll(PATIENCE)
        for _, message in events.messages:
            if message == b"end":
                endpoint.close()
                return
            if message == b"sum":
                endpoint.send(parent, str(int(tensor.sum(dtype=torch.int64))).encode())
            else:
                theirs = msgspec.msgpack.decode(message, type=RegionRef)
                at = np.zeros(1, np.int64)
                ranges = endpoint.prepare(
                    parent, Slices(region, at, SMALL), Slices(theirs, at, SMALL)
                )
        for _, notice in events.notices:
            if notice >= PING:
                assert ranges is not None
                endpoint.put(ranges, np.zeros((1, 2), np.int32), notice)


class Bench:
    def __init__(self, nbytes: int) -> None:
        self.endpoint = create_endpoint("cuda_ipc", "source")
        self.tensor, self.region = device_region(self.endpoint, nbytes)
        command = [sys.executable, __file__, "--child", self.endpoint.address()]
        self.process = subprocess.Popen([*command, "--bytes", str(nbytes)])
        ((self.peer, message),) = self._message()
        self.ref, self.host = msgspec.msgpack.decode(message, type=list[RegionRef])
        self.endpoint.send(self.peer, msgspec.msgpack.encode(self.region.ref))

    def _message(self) -> list[tuple]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            messages = self.endpoint.poll(1.0).messages
            if messages:
                return messages
        raise SystemExit("the other process does not answer")

    def close(self) -> None:
        self.endpoint.send(self.peer, b"end")
        self.process.wait(PATIENCE)
        self.endpoint.close()

    def ranges(self, at: np.ndarray, to: np.ndarray, length: int, host: bool = False) -> Ranges:
        target = self.host if host else self.ref
        here, there = Slices(self.region, at, length), Slices(target, to, length)
        return self.endpoint.prepare(self.peer, here, there)

    def check(self) -> None:
        """What lies there now is what lies here, by its sum."""
        self.endpoint.send(self.peer, b"sum")
        ((_, answer),) = self._message()
        assert int(answer) == int(self.tensor.sum(dtype=torch.int64)), "the bytes differ"

    def seconds(self, ranges: Ranges, index: np.ndarray, times: int) -> float:
        """Of one put, ``WINDOW`` in flight."""
        flying: deque[Ticket] = deque()
        begun = time.perf_counter()
        for _ in range(times):
            flying.append(self.endpoint.put(ranges, index, 0))
            while len(flying) >= WINDOW:
                self._land(flying)
        while flying:
            self._land(flying)
        return (time.perf_counter() - begun) / times

    def _land(self, flying: deque[Ticket]) -> None:
        if not flying[0].done:
            self.endpoint.poll(PATIENCE)
        while flying and flying[0].done:
            if (error := flying.popleft().error) is not None:
                raise error

    def half_trips(self, times: int) -> list[float]:
        at = np.zeros(1, np.int64)
        ranges, index = self.ranges(at, at, SMALL), np.zeros((1, 2), np.int32)
        halves = []
        for i in range(times):
            begun = time.perf_counter()
            self.endpoint.put(ranges, index, PING + i)
            while not self.endpoint.poll(PATIENCE).notices:
                pass
            halves.append((time.perf_counter() - begun) / 2)
        return halves


def copy_seconds(source: torch.Tensor, target: torch.Tensor, times: int) -> float:
    """Of one device-to-device copy, queued one after the other."""
    target.copy_(source)
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        target.copy_(source)
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def measure(quick: bool) -> list[Row]:
    most = 16 << 20 if quick else 1 << 30
    bench = Bench(most)
    bench.tensor.copy_(torch.randint(0, 256, (most,), dtype=torch.uint8, device="cuda"))
    other = torch.empty_like(bench.tensor)
    sizes = [
        size for size in (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30) if size <= most
    ]
    rows, floors = [], {}
    zero = np.zeros(1, np.int64)
    whole = np.zeros((1, 2), np.int32)
    for nbytes in sizes:
        times = max(min((4 << 30) // nbytes, 400), 5) // (4 if quick else 1)
        floors[nbytes] = nbytes / copy_seconds(bench.tensor[:nbytes], other[:nbytes], times)
        ranges = bench.ranges(zero, zero, nbytes)
        bench.seconds(ranges, whole, 3)
        speed = nbytes / bench.seconds(ranges, whole, times)
        rows.append(row("put", speed, floors[nbytes], {"bytes": nbytes, "block": nbytes}))
    bench.check()
    for block in (16 << 10, 64 << 10, 256 << 10):
        for nbytes in (size for size in sizes if 16 * block <= size <= 256 << 20):
            for how in ("own choice", "copy engines"):
                rows.append(scattered(bench, nbytes, block, how, floors[nbytes]))
    rows.append(to_host(bench, times=4 if quick else 20))
    halves = bench.half_trips(200 if quick else 2000)
    rows.append(Row("half round trip", min(halves) * 1e6, "us", {"bytes": SMALL, "what": "min"}))
    median = statistics.median(halves) * 1e6
    rows.append(Row("half round trip", median, "us", {"bytes": SMALL, "what": "median"}))
    bench.close()
    return rows


def to_host(bench: Bench, times: int) -> Row:
    """Into the other process's host memory, over a copy to page-locked memory of this one."""
    pinned = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
    floor = HOST_BYTES / copy_seconds(bench.tensor[:HOST_BYTES], pinned, times)
    ranges = bench.ranges(np.zeros(1, np.int64), np.zeros(1, np.int64), HOST_BYTES, host=True)
    whole = np.zeros((1, 2), np.int32)
    bench.seconds(ranges, whole, 2)
    speed = HOST_BYTES / bench.seconds(ranges, whole, times)
    return row("put to host memory", speed, floor, {"bytes": HOST_BYTES, "block": HOST_BYTES})


def scattered(bench: Bench, nbytes: int, block: int, how: str, floor: float) -> Row:
    count = nbytes // block
    draw = np.random.default_rng(0)
    at = np.arange(count, dtype=np.int64) * block
    ranges = bench.ranges(at, at, block)
    index = np.stack([draw.permutation(count), draw.permutation(count)], 1).astype(np.int32)
    few = _cuda_lane.FEW_PIECES
    _cuda_lane.FEW_PIECES = few if how == "own choice" else 1 << 30
    try:
        bench.seconds(ranges, index, 2)
        speed = nbytes / bench.seconds(ranges, index, max(min((1 << 30) // nbytes, 50), 4))
    finally:
        _cuda_lane.FEW_PIECES = few
    return row("put", speed, floor, {"bytes": nbytes, "block": block, "how": how})


def row(name: str, speed: float, floor: float, params: dict) -> Row:
    return Row(name, speed / 1e9, "GB/s", params, floor=floor / 1e9)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--child", metavar="ADDRESS", help=argparse.SUPPRESS)
    options.add_argument("--bytes", type=int, default=0, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.child:
        child(args.child, args.bytes)
        return
    reason = missing("cuda_ipc")
    if reason:
        print(f"nothing to measure: {reason}")
        return
    print(f"{torch.cuda.get_device_name(0)}; {describe_run(1)}")
    finish(measure(args.quick), args.json)


if __name__ == "__main__":
    main()
