"""vLLM on a GPU, in its own process and environment: a line for each job and answer.

The first job is the engine's settings; its answer names the version. The others are prompts of
token ids, which are read once and then, cached, asked for ``tokens`` and one more.
"""

import json
import os
import sys
import time


def main():
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, as ours is
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    import vllm

    llm = vllm.LLM(
        skip_tokenizer_init=True,
        disable_log_stats=False,  # else no times of tokens
        **json.loads(sys.stdin.readline()),
    )
    answer({"name": f"vLLM {vllm.__version__}"})
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        began = time.perf_counter()
        generate(llm, prompts, 1)
        found = {"reading": time.perf_counter() - began}
        if job["tokens"]:
            found["tpot"] = tpot(generate(llm, prompts, job["tokens"] + 1)[-1])
        answer(found)


def answer(found):
    print(f"\n{json.dumps(found)}", flush=True)


def generate(llm, prompts, tokens):
    import vllm

    greedy = vllm.SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False
    )
    return llm.generate(prompts, greedy, use_tqdm=False)


def tpot(output):
    """Seconds between two tokens of it, from the first to the last."""
    times = output.metrics
    gaps = len(output.outputs[0].token_ids) - 1
    return (times.last_token_ts - times.first_token_ts) / gaps


if __name__ == "__main__":
    main()
