"""How long a first request waits: each run is a new Python that imports the package, makes an `LLM`
with the `local` executor, and asks for one token. The model's files are in the cache.

Settings take turns; prints the median of each part over the rounds, in seconds.

    python benchmarks/start_cpu.py --rounds 3
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from statistics import median

from _common import Row, describe_run, finish, model_parser

WEIGHTS = ("bfloat16", "int8", "gguf")
PARTS = ("import", "ready", "first token")
"""Each counted from the start of Python's own work."""
RUN = """
import json, sys, time
started = time.perf_counter()
from cloverinfer import LLM, ModelConfig, SamplingParams
times = [time.perf_counter() - started]
model, weights, threads = sys.argv[1:]
quantization = None if weights == "bfloat16" else weights
config = ModelConfig(model_path=model, dtype="bfloat16", quantization=quantization)
with LLM(config, threads=int(threads)) as llm:
    times.append(time.perf_counter() - started)
    llm.generate(["Once"], SamplingParams(max_tokens=1, temperature=0.0))
    times.append(time.perf_counter() - started)
print(json.dumps(times))
"""


def arguments() -> argparse.Namespace:
    made = model_parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=3)
    args = made.parse_args()
    if args.quick:
        args.rounds = 1
    return args


def seconds(model: str, weights: str, threads: int) -> list[float]:
    """Of the parts, in a new process."""
    run = [sys.executable, "-c", RUN, model, weights, str(threads)]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise SystemExit(f"{weights} did not start:\n{result.stderr[-2000:]}")
    times: list[float] = json.loads(result.stdout.strip().splitlines()[-1])
    return times


def main() -> None:
    args = arguments()
    print(describe_run(args.threads))
    for weights in WEIGHTS:
        seconds(args.model, weights, args.threads)  # files into memory
    found: dict[str, list[list[float]]] = {weights: [] for weights in WEIGHTS}
    for _ in range(args.rounds):
        for weights, times in found.items():
            times.append(seconds(args.model, weights, args.threads))
    rows = [
        Row(part, median(values), "s", {"weights": weights})
        for weights, times in found.items()
        for part, values in zip(PARTS, zip(*times, strict=True), strict=True)
    ]
    finish(rows, args.json)


if __name__ == "__main__":
    main()
