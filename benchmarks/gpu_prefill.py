"""Prompt tokens read a second on a GPU, through ``LLM.generate`` with the live scheduler.

Random weights of Llama-3.1-8B's shapes in bfloat16; every prompt says one token. The floor: the
arithmetic of products and of causal attention at the rate that bfloat16 products reach in this run.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from _common import Row
from _gpu import (
    LLAMA_8B,
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

GOALS = {1024: 46000, 8192: 41000}
"""Tokens a second, by prompt, on an H200."""
ROWS = "64x1024,8x8192"
HEAD = ["| batch x prompt | tokens/s | at the floor | of it | goal |", "|---|---|---|---|---|"]
ONE = SamplingParams(max_tokens=1, temperature=0.0)


def floor_of(prompt: int, speeds: Speeds) -> float:
    """Tokens a second."""
    cost = cost_of(LLAMA_8B)
    vocab = 2 * LLAMA_8B["hidden_size"] * LLAMA_8B["vocab_size"]
    # One token of a prompt has logits; each sees half of the prompt.
    flops = cost.flops - vocab + cost.layers * cost.attention * prompt / 2
    return speeds.products / flops


def prompts_of(batch: int, prompt: int, row: int, run: int) -> list[list[int]]:
    return random_prompts(batch, prompt, LLAMA_8B["vocab_size"], 10 * row + run)


def measure(llm: LLM, prompts: list[list[int]]) -> float:
    """Tokens read a second."""
    began = time.perf_counter()
    llm.generate(prompts, ONE)
    return sum(map(len, prompts)) / (time.perf_counter() - began)


def main() -> None:
    given = parse_flags(flags(__doc__, ROWS, repeat=4))
    speeds = measure_speeds()
    print(f"products {speeds.products / 1e12:.0f} TFLOP/s", flush=True)
    lines, rows = [*HEAD], []
    with engine(LLAMA_8B, given.quantization, **limits_of(given, 64)) as llm:
        for i, (batch, prompt) in enumerate(given.rows):
            rates = [measure(llm, prompts_of(batch, prompt, i, k)) for k in range(given.repeat)]
            most, params = floor_of(prompt, speeds), {"batch": batch, "prompt": prompt}
            rows.append(Row("prompts", max(rates), "tokens/s", params, most))
            goal = "" if given.quantization else GOALS.get(prompt, "")
            lines.append(
                f"| {batch} x {prompt} | {max(rates):.0f} | {most:.0f} | "
                f"{max(rates) / most:.2f} | {goal} |"
            )
            print(lines[-1], "of", *(f"{rate:.0f}" for rate in rates), flush=True)
            if given.profile:
                prompts = random_prompts(batch, prompt, LLAMA_8B["vocab_size"], 777)
                steps = -(-batch * prompt // given.budget)
                print_profile(kernel_times(lambda some=prompts: llm.generate(some, ONE)), steps)
    if given.peer:
        lines += beside_vllm(given, rows)
    write_results(lines, rows, given)


def beside_vllm(given: argparse.Namespace, rows: list[Row]) -> list[str]:
    """A table of vLLM's figures for the same prompts; ``rows``, ours, take them along."""
    with vllm(LLAMA_8B, given, 64) as peer:
        peer.measure(random_prompts(2, 300, 1000, 0), 0)
        lines = [f"| batch x prompt | {peer.name}, tokens/s | ours over it |", "|---|---|---|"]
        for i, (batch, prompt) in enumerate(given.rows):
            took = min(
                peer.measure(prompts_of(batch, prompt, i, k), 0)[1] for k in range(given.repeat)
            )
            rate = batch * prompt / took
            rows[i] = replace(rows[i], peer=peer.name, peer_value=rate)
            lines.append(f"| {batch} x {prompt} | {rate:.0f} | {rows[i].value / rate:.2f} |")
            print(lines[-1], flush=True)
    return ["", *lines]


if __name__ == "__main__":
    main()
