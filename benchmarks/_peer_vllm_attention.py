"""vLLM's paged attention on the CPU for one decode token of each request, in its environment; a
job a line on standard input. Blocks of 32 in random order; bfloat16 for int8, which it does not
store.
"""

import json
import sys
import time

BLOCK = 32


def main():
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"seconds": measured(job)}
        except (RuntimeError, ValueError, NotImplementedError) as error:
            answer = {"refused": str(error).splitlines()[0]}
        print(json.dumps(answer), flush=True)


def measured(job):
    import torch
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    dtype = getattr(torch, "bfloat16" if job["dtype"] == "int8" else job["dtype"])
    batch, context, heads = job["batch"], job["context"], job["heads"]
    kv_heads, dim = job["kv_heads"], job["dim"]
    isa = _get_attn_isa(dtype, BLOCK, dim)
    needed = batch * context // BLOCK
    blocks = needed * job["copies"]
    pool = torch.full((blocks, kv_heads, 2 * BLOCK, dim), 0.5, dtype=dtype)
    keys, values = pool.chunk(2, dim=2)
    tables = torch.randperm(blocks).to(torch.int32).view(job["copies"], batch, -1)
    q = torch.randn(batch, heads, dim).to(dtype)
    out = torch.empty_like(q)
    starts = torch.arange(batch + 1, dtype=torch.int32)
    lengths = torch.full((batch,), context, dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        batch, heads, kv_heads, dim, lengths, dtype, starts, True, -1, isa, True
    )

    def call(table):
        ops.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lengths, dim**-0.5, True, None, -1, table, 0.0, plan, None
        )

    def seconds():
        done, started = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - started < job["least"]:
            for table in tables:
                call(table)
            done += len(tables)
        return (time.perf_counter() - started) / done

    call(tables[0])
    assert (out.float() - 0.5).abs().max() < 0.01
    return min(seconds() for _ in range(job["rounds"]))


if __name__ == "__main__":
    main()
