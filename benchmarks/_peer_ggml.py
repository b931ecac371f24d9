"""ggml's flash attention for one decode token of each request, in llama-cpp-python's environment;
a job a line on standard input. Keys and values lie in order; one graph holds a node for each copy.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

TYPES = {"float32": 0, "float16": 1, "int8": 8, "bfloat16": 30}
"""``ggml_type``; q8_0 for int8."""


class Params(ctypes.Structure):
    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def library(name):
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    return ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)


def declared(base, cpu):
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for lib, name, result, arguments in (
        (base, "ggml_init", pointer, [Params]),
        (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int, *[number] * 4]),
        (base, "ggml_flash_attn_ext", pointer, [*[pointer] * 5, *[ctypes.c_float] * 3]),
        (base, "ggml_new_graph_custom", pointer, [pointer, ctypes.c_size_t, ctypes.c_bool]),
        (base, "ggml_build_forward_expand", None, [pointer, pointer]),
        (base, "ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        (base, "ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
        (base, "ggml_backend_buffer_free", None, [pointer]),
        (base, "ggml_free", None, [pointer]),
        (base, "ggml_get_data", pointer, [pointer]),
        (base, "ggml_nbytes", ctypes.c_size_t, [pointer]),
        (cpu, "ggml_backend_cpu_init", pointer, []),
        (cpu, "ggml_backend_cpu_set_n_threads", None, [pointer, ctypes.c_int]),
    ):
        getattr(lib, name).restype = result
        getattr(lib, name).argtypes = arguments


def main():
    base, cpu = library("libggml-base.so"), library("libggml-cpu.so")
    declared(base, cpu)
    backend = cpu.ggml_backend_cpu_init()
    cpu.ggml_backend_cpu_set_n_threads(backend, int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps({"seconds": measured(base, backend, job)}), flush=True)


def measured(base, backend, job):
    copies, batch, dim = job["copies"], job["batch"], job["dim"]
    context = base.ggml_init(Params((copies * 4 + 64) * 1024, None, True))
    graph = base.ggml_new_graph_custom(context, copies * 4 + 64, False)
    q = base.ggml_new_tensor_4d(context, 0, dim, 1, job["heads"], batch)
    stored = []
    for _ in range(copies):
        size = (dim, job["context"], job["kv_heads"], batch)
        k, v = (base.ggml_new_tensor_4d(context, TYPES[job["dtype"]], *size) for _ in range(2))
        stored += [k, v]
        node = base.ggml_flash_attn_ext(context, q, k, v, None, dim**-0.5, 0.0, 0.0)
        base.ggml_build_forward_expand(graph, node)
    buffer = base.ggml_backend_alloc_ctx_tensors(context, backend)
    assert buffer
    for tensor in [q, *stored]:  # 0x38 bytes are ordinary numbers in every type
        ctypes.memset(base.ggml_get_data(tensor), 0x38, base.ggml_nbytes(tensor))

    def seconds():
        done, started = 0, time.perf_counter()
        while done == 0 or time.perf_counter() - started < job["least"]:
            assert base.ggml_backend_graph_compute(backend, graph) == 0
            done += copies
        return (time.perf_counter() - started) / done

    seconds()
    best = min(seconds() for _ in range(job["rounds"]))
    base.ggml_backend_buffer_free(buffer)
    base.ggml_free(context)
    return best


if __name__ == "__main__":
    main()
