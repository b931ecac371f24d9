"""Time per output token on a GPU, through ``LLM.generate`` with the live scheduler.

Random weights of Llama-3.1-8B's shapes in bfloat16. Each row's prompts are read first, so that
their cached blocks let all begin to decode together; the time is that of the request that began
last, from its first token to its last. The floor: weights and keys and values read at the speed
measured in this run, or the products' arithmetic where that takes longer than the weights.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from _gpu import (
    LLAMA_8B,
    Speeds,
    cost_of,
    engine,
    measure_speeds,
    parse_rows,
    print_profile,
    random_prompts,
    write_table,
)
from cloverinfer import LLM, SamplingParams

GOALS = {
    (1, 1024): 4.4,
    (8, 1024): 4.6,
    (32, 1024): 5.6,
    (64, 1024): 6.8,
    (128, 1024): 9.2,
    (256, 1024): 15.2,
    (32, 8192): 12.6,
    (1, 8192): 4.6,
}
"""Milliseconds, by batch and prompt, on an H200."""
ROWS = ",".join(f"{batch}x{prompt}" for batch, prompt in GOALS)
HEAD = [
    "| batch x prompt | ms a token | floor | over floor | goal | tokens/s | prompts: tokens/s |",
    "|---|---|---|---|---|---|---|",
]


def floor_of(batch: int, prompt: int, tokens: int, speeds: Speeds) -> float:
    """Seconds of a step halfway through the output."""
    cost = cost_of(LLAMA_8B)
    dense = max(cost.weights / speeds.read, cost.flops * batch / speeds.products)
    return dense + batch * (prompt + tokens / 2) * cost.kv_bytes / speeds.read


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def measure(llm: LLM, batch: int, prompt: int, tokens: int, seed: int) -> tuple[float, float]:
    """Seconds per output token, and prompt tokens read a second."""
    prompts = random_prompts(batch, prompt, LLAMA_8B["vocab_size"], seed)
    read = llm.generate(prompts, greedy(1))
    reading = max(one.metrics["latency"] for one in read)
    said = llm.generate(prompts, greedy(tokens + 1))
    return said[-1].metrics["tpot"], batch * prompt / reading


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--rows", type=parse_rows, default=parse_rows(ROWS), help="8x1024,1x8192")
    made.add_argument("--tokens", type=int, default=128, help="timed output tokens")
    made.add_argument("--repeat", type=int, default=1, help="measurements of each row; best counts")
    made.add_argument("--out", type=Path, help="also write the table to this file")
    made.add_argument("--profile", action="store_true", help="print each row's time by kernel")
    made.add_argument("--executor", default="local", help="local or process")
    made.add_argument("--budget", type=int, default=16384, help="max_num_batched_tokens")
    given = made.parse_args()
    speeds = measure_speeds()
    print(f"read {speeds.read / 1e12:.2f} TB/s, products {speeds.products / 1e12:.0f} TFLOP/s")
    longest = max(prompt for _, prompt in given.rows) + given.tokens + 64
    most = max(batch for batch, _ in given.rows)
    lines = [*HEAD]
    limits: dict[str, Any] = {"max_num_seqs": most, "max_num_batched_tokens": given.budget}
    limits["executor"] = given.executor
    with engine(LLAMA_8B, max_model_len=longest, **limits) as llm:
        llm.generate(random_prompts(2, 300, 1000, 0), greedy(8))
        for i, (batch, prompt) in enumerate(given.rows):
            runs = [
                measure(llm, batch, prompt, given.tokens, 1 + i + 100 * k)
                for k in range(given.repeat)
            ]
            took, reading = min(runs)[0], max(run[1] for run in runs)
            floor = floor_of(batch, prompt, given.tokens, speeds)
            goal = GOALS.get((batch, prompt), "")
            lines.append(
                f"| {batch} x {prompt} | {took * 1e3:.2f} | {floor * 1e3:.2f} | "
                f"{took / floor:.2f} | {goal} | {batch / took:.0f} | {reading:.0f} |"
            )
            print(lines[-1], flush=True)
            if given.profile:
                profile_row(llm, batch, prompt)
    write_table(lines, given.out)


def profile_row(llm: LLM, batch: int, prompt: int) -> None:
    """Of 16 steps, the one that begins them apart."""
    prompts = random_prompts(batch, prompt, LLAMA_8B["vocab_size"], 77)
    llm.generate(prompts, greedy(1))
    print(f"\n{batch} x {prompt}, 17 tokens each:")
    print_profile(lambda: llm.generate(prompts, greedy(17)), 17)


if __name__ == "__main__":
    main()
