"""Rates of Ray actor calls that carry an array; one job on standard input.

The actor copies what comes into memory of its own, as a put does. Whole arrays only: a call has no
pieces.
"""

import json
import sys
import time

import numpy as np
import ray

LATENCY_BYTES = 4096
LATENCY_ROUNDS = 500


@ray.remote
class Far:
    def __init__(self, nbytes):
        self.memory = np.ones(nbytes, np.uint8)

    def take(self, data):
        self.memory[: len(data)] = data

    def echo(self, data):
        return data


def rate(far, memory, nbytes, rounds):
    count = max(1, min(20, (64 << 20) // nbytes))
    best = float("inf")
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        ray.get([far.take.remote(memory[:nbytes]) for _ in range(count)])
        best = min(best, time.perf_counter() - begun)
    return nbytes * count / best


def latency(far, memory):
    times = []
    for _ in range(LATENCY_ROUNDS):
        begun = time.perf_counter()
        ray.get(far.echo.remote(memory[:LATENCY_BYTES]))
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2] / 2


def main():
    job = json.load(sys.stdin)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    memory = np.ones(job["largest"], np.uint8)
    far = Far.remote(job["largest"])
    rates = {
        f"{nbytes}/{piece}": rate(far, memory, nbytes, job["rounds"])
        for nbytes, piece in job["cases"]
        if nbytes == piece
    }
    print(json.dumps({"rates": rates, "latency": latency(far, memory)}), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
