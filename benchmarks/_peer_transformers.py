"""Rates of transformers' ``generate``, in a process of its own; one job on standard input."""

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main():
    job = json.load(sys.stdin)
    torch.set_num_threads(job["threads"])
    dtype = getattr(torch, job["dtype"])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).eval()
    batch = torch.tensor(job["prompts"])

    def seconds(count):
        started = time.perf_counter()
        model.generate(
            batch,
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            attention_mask=torch.ones_like(batch),
            pad_token_id=0,
        )
        return time.perf_counter() - started

    seconds(4)
    first = min(seconds(1) for _ in range(3))
    tokens = job["tokens"]
    rates = {"prefill_tokens_per_second": batch.numel() / first}
    if tokens > 1:
        rates["tokens_per_second"] = len(batch) * (tokens - 1) / (seconds(tokens) - first)
    print(json.dumps(rates))


if __name__ == "__main__":
    main()
