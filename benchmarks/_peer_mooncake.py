"""Rates of Mooncake's transfer engine over TCP between two processes; one job on standard input."""

import json
import multiprocessing
import os
import sys
import time

import numpy as np
from mooncake.engine import TransferEngine

BATCH = 256
"""Pieces of one call; its queue refuses thousands."""


def check(status):
    if status != 0:
        raise RuntimeError(f"a write failed: {status}")


def engine(nbytes):
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the engine did not start")
    memory = np.ones(nbytes, np.uint8)
    if made.register_memory(memory.ctypes.data, nbytes) != 0:
        raise RuntimeError("the memory was not registered")
    return made, memory


def far(pipe, nbytes):
    made, memory = engine(nbytes)
    pipe.send((f"127.0.0.1:{made.get_rpc_port()}", memory.ctypes.data))
    pipe.recv()
    os._exit(0)


def rate(made, target, addresses, case, rounds):
    nbytes, piece = case
    offsets = [*range(0, nbytes, 2 * piece), *range(piece, nbytes, 2 * piece)]
    mine, theirs = ([address + offset for offset in offsets] for address in addresses)
    lengths = [piece] * len(offsets)
    count = max(1, min(20, (64 << 20) // nbytes))
    best = float("inf")
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(count):
            if piece == nbytes:
                check(made.transfer_sync_write(target, mine[0], theirs[0], nbytes))
                continue
            for i in range(0, len(offsets), BATCH):
                part = slice(i, i + BATCH)
                check(
                    made.batch_transfer_sync_write(target, mine[part], theirs[part], lengths[part])
                )
        best = min(best, time.perf_counter() - begun)
    return nbytes * count / best


def main():
    job = json.load(sys.stdin)
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=far, args=(theirs, job["largest"]), daemon=True
    )
    process.start()
    made, memory = engine(job["largest"])
    target, address = pipe.recv()
    addresses = (memory.ctypes.data, address)
    rates = {
        f"{c[0]}/{c[1]}": rate(made, target, addresses, c, job["rounds"]) for c in job["cases"]
    }
    print(json.dumps({"rates": rates}), flush=True)
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
