"""The other process of the shm tests: ``python transport_child.py ROLE ADDRESS``.

echo    sends every message back, answers notice n with a put of notice n + 1, ends at b"end"
flood   puts and sends to ADDRESS until it is killed
read    meets ADDRESS, reads one message, then sleeps without ever polling again
stuck   meets ADDRESS, then sleeps without ever polling
"""

from __future__ import annotations

import sys
import time

import msgspec
import numpy as np

from cloverinfer.transport import Endpoint, RegionRef, Slices, create_endpoint

NBYTES = 1 << 16


def main(role: str, address: str) -> None:
    endpoint = create_endpoint("shm", role)
    try:
        region = endpoint.register(NBYTES)
        parent = endpoint.connect(address)
        endpoint.send(parent, b"region " + msgspec.msgpack.encode(region.ref))
        if role == "stuck":
            time.sleep(60)
        messages = wait_for(endpoint)
        theirs = msgspec.msgpack.decode(messages.pop(0), type=RegionRef)
        whole = np.zeros(1, np.int64)
        ranges = endpoint.prepare(
            parent, Slices(region, whole, NBYTES), Slices(theirs, whole, NBYTES)
        )
        if role == "read":
            time.sleep(60)
        everything = np.zeros((1, 2), np.int32)
        notice = 0
        while role == "flood":
            region.buffer[:] = bytes([notice % 256]) * NBYTES
            endpoint.put(ranges, everything, notice)
            endpoint.send(parent, b"x" * (notice * 7919 % 100_000))
            notice += 1
        while True:
            for message in messages:
                endpoint.send(parent, message)
                if message == b"end":
                    return
            events = endpoint.poll(60.0)
            for _, notice in events.notices:
                endpoint.put(ranges, everything, notice + 1)
            messages = [message for _, message in events.messages]
    finally:
        endpoint.close()


def wait_for(endpoint: Endpoint) -> list[bytes]:
    while True:
        events = endpoint.poll(60.0)
        if events.messages:
            return [message for _, message in events.messages]


if __name__ == "__main__":
    main(*sys.argv[1:])
