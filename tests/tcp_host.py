"""One host of the tests over two hosts: ``python -m tests.tcp_host ROLE HOST [ADDRESS]``.

listen  prints its address; answers notice n, which says that its region is full of n, by putting
        n + 1 into the region that a message named
visit   meets ADDRESS, exchanges patterns, prints "whole"; after a line from its standard input,
        before which the network is cut, puts once more and prints what becomes of it
"""

from __future__ import annotations

import contextlib
import sys

import msgspec
import numpy as np

from cloverinfer.config.network import NetworkConfig
from cloverinfer.transport import Peer, Ranges, Region, RegionRef, Slices
from cloverinfer.transport.tcp import TcpEndpoint
from tests.transport_kit import array, collect, finish, settle

PIECE = 64 << 10
PIECES = 256
EVERY = np.stack([np.arange(PIECES), np.arange(PIECES)[::-1]], 1).astype(np.int32)
SECRET = "of both hosts"


def prepare(endpoint: TcpEndpoint, peer: Peer, region: Region, ref: RegionRef) -> Ranges:
    at = np.arange(PIECES, dtype=np.int64) * PIECE
    return endpoint.prepare(peer, Slices(region, at, PIECE), Slices(ref, at, PIECE))


def listen(endpoint: TcpEndpoint, region: Region) -> None:
    print(endpoint.address(), flush=True)
    peer, data = collect(endpoint, messages=1).messages[0]
    ranges = prepare(endpoint, peer, region, msgspec.msgpack.decode(data, type=RegionRef))
    endpoint.send(peer, msgspec.msgpack.encode(region.ref))
    for n in (1, 3):
        assert collect(endpoint, notices=1).notices == [(peer, n)]
        assert (array(region) == n).all()
        array(region)[:] = n + 1
        settle(endpoint, endpoint.put(ranges, EVERY, n + 1))
    sys.stdin.readline()


def visit(endpoint: TcpEndpoint, region: Region, address: str) -> None:
    peer = endpoint.connect(address)
    endpoint.send(peer, msgspec.msgpack.encode(region.ref))
    data = collect(endpoint, messages=1).messages[0][1]
    ranges = prepare(endpoint, peer, region, msgspec.msgpack.decode(data, type=RegionRef))
    for n in (1, 3):
        array(region)[:] = n
        settle(endpoint, endpoint.put(ranges, EVERY, n))
        assert collect(endpoint, notices=1).notices == [(peer, n + 1)]
        assert (array(region) == n + 1).all()
    print("whole", flush=True)
    sys.stdin.readline()
    ticket = endpoint.put(ranges, EVERY, 9, timeout=0.5)
    finish(endpoint, ticket)
    print(type(ticket.error).__name__, flush=True)


def main(role: str, host: str, *address: str) -> None:
    network = NetworkConfig(bind_host="0.0.0.0", advertise_host=host, secret=SECRET)
    with contextlib.closing(TcpEndpoint(role, network)) as endpoint:
        region = endpoint.register(PIECE * PIECES)
        if role == "visit":
            visit(endpoint, region, *address)
        else:
            listen(endpoint, region)


if __name__ == "__main__":
    main(*sys.argv[1:])
