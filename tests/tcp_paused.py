"""The processes of the test of stopped ones: ``python -m tests.tcp_paused receiver`` says where it
is and which region it has, then which notice came; ``writer ADDRESS REF TIMEOUT`` puts there, says
so, and then how the put ended."""

from __future__ import annotations

import sys

import msgspec
import numpy as np

from cloverinfer.core.errors import TransportError
from cloverinfer.transport import RegionRef, Slices, create_endpoint
from tests.transport_kit import PATIENCE, collect, rows

NBYTES = 4096


def receive() -> None:
    endpoint = create_endpoint("tcp", "receiver")
    region = endpoint.register(NBYTES)
    print(endpoint.address(), msgspec.msgpack.encode(region.ref).hex(), flush=True)
    print(collect(endpoint, notices=1).notices[0][1], flush=True)
    sys.stdin.read()
    endpoint.close()


def write(address: str, ref: str, timeout: str) -> None:
    endpoint = create_endpoint("tcp", "writer")
    peer = endpoint.connect(address)
    there = msgspec.msgpack.decode(bytes.fromhex(ref), type=RegionRef)
    whole = np.zeros(1, np.int64)
    ranges = endpoint.prepare(
        peer, Slices(endpoint.register(NBYTES), whole, NBYTES), Slices(there, whole, NBYTES)
    )
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        ticket = endpoint.put(ranges, rows((0, 0)), 7, timeout=float(timeout))
        print("put", flush=True)
        while not ticket.done:
            assert endpoint.poll(PATIENCE).tickets == [ticket]
        print(ticket.error, flush=True)
    except TransportError as problem:
        print(problem, flush=True)
    endpoint.close()


if __name__ == "__main__":
    {"receiver": receive, "writer": write}[sys.argv[1]](*sys.argv[2:])
