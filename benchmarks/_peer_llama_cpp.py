"""Decode rate of llama-cpp-python, in an environment of its own; one job on standard input.

Batched decode uses the low-level API: one sequence per prompt, one token of each per call.
"""

import json
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np


def add(batch, i, token, position, sequence, wants_logits):
    batch.token[i] = token
    batch.pos[i] = position
    batch.n_seq_id[i] = 1
    batch.seq_id[i][0] = sequence
    batch.logits[i] = wants_logits


def gguf_of(folder):
    """The GGUF that the model's cached folder was made from, or one in the folder."""
    for place in (Path(folder), Path(folder).parent):
        for path in sorted(place.glob("*.gguf")):
            return str(path)
    raise SystemExit(f"no GGUF beside {folder}")


def main():
    job = json.load(sys.stdin)
    prompts, tokens, threads = job["prompts"], job["tokens"], job["threads"]
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(gguf_of(job["model"]).encode(), params)
    context_params = llama_cpp.llama_context_default_params()
    longest = max(map(len, prompts)) + tokens
    context_params.n_ctx = longest * len(prompts)
    context_params.n_batch = max(512, sum(map(len, prompts)))
    context_params.n_seq_max = len(prompts)
    context_params.n_threads = context_params.n_threads_batch = threads
    context = llama_cpp.llama_init_from_model(model, context_params)
    vocab = llama_cpp.llama_model_get_vocab(model)
    size = llama_cpp.llama_vocab_n_tokens(vocab)
    batch = llama_cpp.llama_batch_init(context_params.n_batch, 0, 1)

    batch.n_tokens = 0
    last = []
    for sequence, prompt in enumerate(prompts):
        for position, token in enumerate(prompt):
            add(batch, batch.n_tokens, token, position, sequence, position == len(prompt) - 1)
            batch.n_tokens += 1
        last.append(batch.n_tokens - 1)
    started = time.perf_counter()
    assert llama_cpp.llama_decode(context, batch) == 0
    prefill = time.perf_counter() - started

    def pick(i):
        pointer = llama_cpp.llama_get_logits_ith(context, i)
        return int(np.ctypeslib.as_array(pointer, shape=(size,)).argmax())

    chosen = [pick(i) for i in last]
    started = time.perf_counter()
    for step in range(tokens - 1):
        batch.n_tokens = len(prompts)
        for sequence, prompt in enumerate(prompts):
            add(batch, sequence, chosen[sequence], len(prompt) + step, sequence, True)
        assert llama_cpp.llama_decode(context, batch) == 0
        chosen = [pick(i) for i in range(len(prompts))]
    seconds = time.perf_counter() - started
    print(
        json.dumps(
            {
                "tokens_per_second": len(prompts) * (tokens - 1) / seconds,
                "prefill_tokens_per_second": sum(map(len, prompts)) / prefill,
            }
        )
    )


if __name__ == "__main__":
    main()
