"""Time per output token on a GPU, through ``LLM.generate`` with the live scheduler.

Random weights of Llama-3.1-8B's shapes in bfloat16. Each row's prompts are read first, so that
their cached blocks let all begin to decode together; the time is that of the request that began
last, from its first token to its last. The floor: weights and keys and values read at the speed
measured in this run, or the products' arithmetic where that takes longer than the weights (with
``--quantization fp8`` at bfloat16's rate, which is half of float8's).
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from _common import Row
from _gpu import (
    LLAMA_8B,
    Cost,
    Speeds,
    cost_of,
    engine,
    flags,
    kernel_times,
    limits_of,
    measure_speeds,
    parse_flags,
    print_profile,
    random_prompts,
    vllm,
    write_results,
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
PROFILED = 128
"""Decode steps of a profile."""
HEAD = [
    "| batch x prompt | ms a token | floor | over floor | goal | tokens/s | prompts: tokens/s |",
    "|---|---|---|---|---|---|---|",
]


def floor_of(cost: Cost, batch: int, prompt: int, tokens: int, speeds: Speeds) -> float:
    """Seconds of a step halfway through the output."""
    dense = max(cost.weights / speeds.read, cost.flops * batch / speeds.products)
    return dense + batch * (prompt + tokens / 2) * cost.kv_bytes / speeds.read


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def prompts_of(batch: int, prompt: int, row: int, run: int) -> list[list[int]]:
    return random_prompts(batch, prompt, LLAMA_8B["vocab_size"], 1 + row + 100 * run)


def measure(llm: LLM, prompts: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds per output token, and those that the prompts took to be read."""
    read = llm.generate(prompts, greedy(1))
    said = llm.generate(prompts, greedy(tokens + 1))
    return said[-1].metrics["tpot"], max(one.metrics["latency"] for one in read)


def main() -> None:
    made = flags(__doc__, ROWS, repeat=1)
    made.add_argument("--tokens", type=int, default=128, help="timed output tokens")
    given = parse_flags(made)
    longest = max(given.tokens, 17 + PROFILED if given.profile else 0)
    speeds = measure_speeds()
    print(f"read {speeds.read / 1e12:.2f} TB/s, products {speeds.products / 1e12:.0f} TFLOP/s")
    lines, rows = [*HEAD], []
    cost = cost_of(LLAMA_8B, given.quantization)
    with engine(LLAMA_8B, given.quantization, **limits_of(given, longest + 64)) as llm:
        llm.generate(random_prompts(2, 300, 1000, 0), greedy(8))
        for i, (batch, prompt) in enumerate(given.rows):
            runs = [
                measure(llm, prompts_of(batch, prompt, i, k), given.tokens)
                for k in range(given.repeat)
            ]
            took, reading = (min(each) for each in zip(*runs, strict=True))
            floor = floor_of(cost, batch, prompt, given.tokens, speeds)
            params = {"batch": batch, "prompt": prompt}
            rows.append(Row("decode", took * 1e3, "ms a token", params, floor * 1e3))
            goal = "" if given.quantization else GOALS.get((batch, prompt), "")
            lines.append(
                f"| {batch} x {prompt} | {took * 1e3:.2f} | {floor * 1e3:.2f} | "
                f"{took / floor:.2f} | {goal} | {batch / took:.0f} | "
                f"{batch * prompt / reading:.0f} |"
            )
            print(lines[-1], flush=True)
            if given.profile:
                profile_row(llm, batch, prompt)
    if given.peer:
        lines += beside_vllm(given, rows)
    write_results(lines, rows, given)


def beside_vllm(given: argparse.Namespace, rows: list[Row]) -> list[str]:
    """A table of vLLM's figures for the same prompts; ``rows``, ours, take them along."""
    with vllm(LLAMA_8B, given, given.tokens + 64) as peer:
        peer.measure(random_prompts(2, 300, 1000, 0), 8)
        lines = [
            f"| batch x prompt | {peer.name}, ms a token | ours over it | prompts: tokens/s |",
            "|---|---|---|---|",
        ]
        for i, (batch, prompt) in enumerate(given.rows):
            runs = [
                peer.measure(prompts_of(batch, prompt, i, k), given.tokens)
                for k in range(given.repeat)
            ]
            took, reading = (min(each) for each in zip(*runs, strict=True))
            rows[i] = replace(rows[i], peer=peer.name, peer_value=took * 1e3)
            lines.append(
                f"| {batch} x {prompt} | {took * 1e3:.2f} | {rows[i].value / took / 1e3:.2f} | "
                f"{batch * prompt / reading:.0f} |"
            )
            print(lines[-1], flush=True)
    return ["", *lines]


def profile_row(llm: LLM, batch: int, prompt: int) -> None:
    """Of decode steps: what more tokens take than few, so that the steps that begin them, which
    are not always as many, hardly count."""
    prompts = random_prompts(batch, prompt, LLAMA_8B["vocab_size"], 77)
    llm.generate(prompts, greedy(1))
    fewer, more = (
        kernel_times(lambda n=tokens: llm.generate(prompts, greedy(n)))
        for tokens in (17, 17 + PROFILED)
    )
    none = 0.0, 0
    left = {
        name: (took - fewer.get(name, none)[0], count - fewer.get(name, none)[1])
        for name, (took, count) in more.items()
    }
    print(f"\n{batch} x {prompt}, {PROFILED} steps of decode:")
    print_profile(left, PROFILED)


if __name__ == "__main__":
    main()
