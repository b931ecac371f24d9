"""Rates of vLLM on the CPU, in an environment of its own; one job on standard input."""

import json
import os
import sys
import time


def main():
    job = json.load(sys.stdin)
    # By itself it leaves a core to its own scheduler: half the threads of a machine with two.
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    from vllm import LLM, SamplingParams

    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    longest = max(map(len, job["prompts"])) + job["tokens"]
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        max_model_len=longest + 8,
        enable_prefix_caching=False,
        max_num_seqs=max(4, len(prompts)),
        kv_cache_memory_bytes=1 << 30,  # else a share of all memory, which must be free
    )

    def seconds(count):
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    seconds(4)
    first = min(seconds(1) for _ in range(2))
    rate = len(prompts) * (job["tokens"] - 1) / (seconds(job["tokens"]) - first)
    prefilled = sum(map(len, job["prompts"]))
    print(json.dumps({"tokens_per_second": rate, "prefill_tokens_per_second": prefilled / first}))


if __name__ == "__main__":
    main()
