"""Rates of NIXL's writes between two processes, host memory; one job on standard input."""

import json
import multiprocessing
import os
import sys
import time

import numpy as np
from nixl_cu12 import nixl_agent

LATENCY_BYTES = 4096
LATENCY_ROUNDS = 200


def agent(name, nbytes):
    made = nixl_agent(name)
    memory = np.ones(nbytes, np.uint8)
    made.register_memory([(memory.ctypes.data, nbytes, 0, "")], "DRAM")
    return made, memory


def descriptors(address, nbytes, piece):
    return [(address + i * piece, piece, 0) for i in range(nbytes // piece)]


def write(made, handle, notice=b""):
    state = made.transfer(handle, notice)
    while state == "PROC":
        state = made.check_xfer_state(handle)
    if state != "DONE":
        raise RuntimeError("a write failed")


def notified(made):
    while not made.get_new_notifs():
        pass


def whole(made, other, mine, theirs):
    local = made.prep_xfer_dlist("", [(mine, LATENCY_BYTES, 0)], "DRAM")
    remote = made.prep_xfer_dlist(other, [(theirs, LATENCY_BYTES, 0)], "DRAM")
    return made.make_prepped_xfer("WRITE", local, [0], remote, [0], b"n")


def far(pipe, nbytes):
    made, memory = agent("far", nbytes)
    pipe.send((made.get_agent_metadata(), memory.ctypes.data))
    metadata, theirs = pipe.recv()
    made.add_remote_agent(metadata)
    back = whole(made, "near", memory.ctypes.data, theirs)
    pipe.send("ready")
    for _ in range(pipe.recv()):
        notified(made)
        write(made, back, b"n")
    pipe.recv()
    os._exit(0)  # its own ending crashes


def rate(made, addresses, case, rounds):
    nbytes, piece = case
    sides = [descriptors(address, nbytes, piece) for address in addresses]
    local = made.prep_xfer_dlist("", sides[0], "DRAM")
    remote = made.prep_xfer_dlist("far", sides[1], "DRAM")
    index = np.arange(len(sides[0]), dtype=np.int32)
    index = np.concatenate([index[::2], index[1::2]])  # no two neighbours adjoin
    handle = made.make_prepped_xfer("WRITE", local, index, remote, index)
    count = max(1, min(50, (64 << 20) // nbytes))
    best = float("inf")
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(count):
            write(made, handle)
        best = min(best, time.perf_counter() - begun)
    return nbytes * count / best


def latency(made, pipe, addresses):
    there = whole(made, "far", *addresses)
    pipe.send(LATENCY_ROUNDS)
    times = []
    for _ in range(LATENCY_ROUNDS):
        begun = time.perf_counter()
        write(made, there, b"n")
        notified(made)
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2] / 2


def main():
    job = json.load(sys.stdin)
    pipe, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=far, args=(theirs, job["largest"]), daemon=True
    )
    process.start()
    made, memory = agent("near", job["largest"])
    metadata, address = pipe.recv()
    made.add_remote_agent(metadata)
    pipe.send((made.get_agent_metadata(), memory.ctypes.data))
    pipe.recv()
    addresses = (memory.ctypes.data, address)
    rates = {f"{c[0]}/{c[1]}": rate(made, addresses, c, job["rounds"]) for c in job["cases"]}
    print(json.dumps({"rates": rates, "latency": latency(made, pipe, addresses)}), flush=True)
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
