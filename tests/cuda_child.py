"""The other process of the cuda_ipc tests: ``python cuda_child.py ROLE ADDRESS``.

echo    answers notice n by putting its region back, with notice n + 1; ends at b"end"
stall   puts, after an event that never happens, then says b"stalled" and sleeps
"""

from __future__ import annotations

import sys
import time

import msgspec
import numpy as np

from cloverinfer.transport import RegionRef, Slices
from cloverinfer.transport.cuda_ipc import CudaIpcEndpoint
from tests.cuda_kit import RealDriver

NBYTES = 32 << 20
LENGTH = 16 << 10


def main(role: str, address: str) -> None:
    driver = RealDriver()
    endpoint = CudaIpcEndpoint(role, driver=driver)
    try:
        region = endpoint.register(driver.allocate(NBYTES))
        parent = endpoint.connect(address)
        endpoint.send(parent, b"region " + msgspec.msgpack.encode(region.ref))
        theirs = None
        while theirs is None:
            for _, message in endpoint.poll(60.0).messages:
                theirs = msgspec.msgpack.decode(message, type=RegionRef)
        at = np.arange(0, NBYTES, LENGTH, dtype=np.int64)
        pieces = Slices(region, at, LENGTH), Slices(theirs, at, LENGTH)
        ranges = endpoint.prepare(parent, *pieces)
        index = np.repeat(np.arange(len(at), dtype=np.int32)[::-1, None], 2, axis=1)
        if role == "stall":
            event, _ = driver.event()
            endpoint.put(ranges, index, 7, after=event)
            endpoint.send(parent, b"stalled")
            time.sleep(60)
        while True:
            events = endpoint.poll(60.0)
            if b"end" in [message for _, message in events.messages]:
                return
            for _, notice in events.notices:
                endpoint.put(ranges, index, notice + 1)
    finally:
        endpoint.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
