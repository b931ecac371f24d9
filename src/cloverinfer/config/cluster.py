"""What a cluster is made of. Every field has a default; units stand in the docstrings."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ..core.errors import ConfigError
from .network import NetworkConfig

DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
TOPOLOGIES = ("colocated", "pd", "pda")
EXECUTORS = ("local", "process", "ray")
TRANSPORTS = ("auto", "inproc", "cuda_ipc", "shm", "rdma", "tcp", "ray", "nixl")
ATTENTION_BACKENDS = ("auto", "cpu", "cuda", "torch")
PROMPT_ATTENTIONS = ("auto", "own", "flash-attn", "flashinfer")
MOST = 10**9
"""No count or size means anything beyond it."""
_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]{1,3})?")
MODEL_IMPLS = ("auto", "native", "compiled")
LOWERINGS = ("eager", "inductor")
LOAD_FORMATS = ("auto", "safetensors", "pt", "gguf", "dummy")
QUANTIZATIONS = ("int8", "gguf", "fp8")


def _check(where: str, field: str, value: Any, good: bool, allowed: str) -> None:
    if not good:
        raise ConfigError(f"{where}.{field} must be {allowed}, not {value!r}")


def _int_at_least(where: str, config: Any, low: int, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        good = isinstance(value, int) and not isinstance(value, bool) and low <= value <= MOST
        _check(where, field, value, good, f"an integer from {low} to {MOST}")


def _positive(where: str, config: Any, *fields: str) -> None:
    for field in fields:
        value = getattr(config, field)
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MOST
        _check(where, field, value, good, f"a number > 0, at most {MOST}")


_CHOICES = {
    "topology": TOPOLOGIES,
    "executor": EXECUTORS,
    "transport": TRANSPORTS,
    "attention_backend": ATTENTION_BACKENDS,
    "prompt_attention": PROMPT_ATTENTIONS,
    "layer_loop": ("auto", "python"),
}


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and how its weights are held."""

    model_path: str = "smollm2-135m"
    """A known name, a Hugging Face directory, or a GGUF file."""
    dtype: str = "auto"
    """float32, bfloat16, float16; auto is bfloat16 on GPUs, on processors that multiply it natively
    and, with AVX2 but no AVX-512, for models of Llama's family that are not compiled; else
    float32."""
    prefill_dtype: str | None = None
    """Type of the prefill nodes' weights, arithmetic and KV cache, one of ``dtype``'s; receivers
    convert their blocks. None: as ``dtype``."""
    quantization: str | None = None
    """Of matrices: on CPUs int8 (8 bits and a scale for each 32 weights, made as they are loaded)
    or gguf (as the GGUF file stores them, where that is Q4_0, Q4_1 or Q8_0); on GPUs fp8 (e4m3 and
    a scale for each output, made as they are loaded; what they multiply is rounded to e4m3 too,
    but for few rows on compute capability 9.0; on a CPU it is a slow reference). None: as
    ``dtype``."""
    load_format: str = "auto"
    """auto, safetensors, pt, gguf, or dummy (random weights from a config alone)."""
    model_impl: str = "auto"
    """native: a dense half written for the family; compiled: made from the model of transformers
    and split at attention (once, into the cache); auto: native where there is one."""
    lowering: str = "eager"
    """How a compiled model's stages run: eager, or inductor (``torch.compile``, while a node loads
    them, which needs a C++ compiler, on a GPU Triton)."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None: the model's own limit."""
    seed: int = 0
    """Seed of dummy weights, and of the seeds drawn for requests that bring none."""

    def __post_init__(self) -> None:
        _check(
            "model",
            "model_path",
            self.model_path,
            isinstance(self.model_path, str) and bool(self.model_path),
            "a non-empty string",
        )
        known = f"one of {', '.join(DTYPES)}"
        _check("model", "dtype", self.dtype, self.dtype in DTYPES, known)
        prefill = self.prefill_dtype
        _check("model", "prefill_dtype", prefill, prefill is None or prefill in DTYPES, known)
        _check(
            "model",
            "quantization",
            self.quantization,
            self.quantization is None or self.quantization in QUANTIZATIONS,
            f"one of {', '.join(QUANTIZATIONS)}",
        )
        _check(
            "model",
            "load_format",
            self.load_format,
            self.load_format in LOAD_FORMATS,
            f"one of {', '.join(LOAD_FORMATS)}",
        )
        for field, choices in (("model_impl", MODEL_IMPLS), ("lowering", LOWERINGS)):
            value = getattr(self, field)
            _check("model", field, value, value in choices, f"one of {', '.join(choices)}")
        if self.max_model_len is not None:
            _int_at_least("model", self, 1, "max_model_len")
        _int_at_least("model", self, 0, "seed")


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The KV pools."""

    block_size: int = 32
    """Tokens per block: a power of two from 1 to 256."""
    prefill_block_size: int | None = None
    """Tokens per block of the prefill nodes' pools, a power of two from 1 to 256; receivers convert
    their blocks. None: as ``block_size``."""
    memory_gib: float | None = None
    """Budget of each attention node's pool (and of each prefill node's) in GiB. None: 1 on a CPU,
    and on a GPU what ``gpu_memory_utilization`` leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that the nodes on it use together. What their weights leave is theirs
    in equal parts, each for what a step needs and a pool, which gets the rest."""
    num_blocks: int | None = None
    """Blocks of ``block_size`` tokens per pool; overrides ``memory_gib`` and
    ``gpu_memory_utilization``. A prefill node with another block size has blocks for as many
    tokens."""
    kv_cache_dtype: str = "auto"
    """Type that keys and values are stored in: auto (as each node computes), float32, bfloat16,
    float16, int8 with a scale for each token and KV head (on CPUs), or fp8 (e4m3; on GPUs)."""
    enable_prefix_caching: bool = True
    """Full blocks stay findable by their tokens after a request ends, until the space is needed."""

    def __post_init__(self) -> None:
        for field in ("block_size", "prefill_block_size"):
            size = getattr(self, field)
            if size is None and field != "block_size":
                continue
            _int_at_least("cache", self, 1, field)
            good = size <= 256 and size & (size - 1) == 0
            _check("cache", field, size, good, "a power of two from 1 to 256")
        known = f"one of {', '.join(KV_CACHE_DTYPES)}"
        stored = self.kv_cache_dtype
        _check("cache", "kv_cache_dtype", stored, stored in KV_CACHE_DTYPES, known)
        if self.memory_gib is not None:
            _positive("cache", self, "memory_gib")
        share = self.gpu_memory_utilization
        good = isinstance(share, (int, float)) and not isinstance(share, bool) and 0 < share <= 1
        _check("cache", "gpu_memory_utilization", share, good, "a number above 0, at most 1")
        if self.num_blocks is not None:
            _int_at_least("cache", self, 1, "num_blocks")


CPU_ROWS, GPU_ROWS = 64, 256
"""``scheduler.max_num_seqs`` by where nodes decode: a GPU's step hardly takes longer with more."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Batching, admission and deadlines."""

    max_num_seqs: int | None = None
    """Most requests that one dense node decodes at a time; None: 256 where all nodes that decode
    are on GPUs, else 64."""
    max_num_batched_tokens: int = 2048
    """Token budget of one forward: prefill chunks and decode rows together."""
    enable_chunked_prefill: bool = True
    """False: a prompt is prefilled in one forward (the token budget is raised to hold it)."""
    async_scheduling: bool | None = None
    """Each step of a colocated or decode node is sent while the one before it is computed, with
    every row that goes on whatever that one says; None: where nodes are on GPUs."""
    max_queue: int = 1024
    """Most requests that may wait; one more is refused."""
    num_wavefronts: int = 1
    """Wavefronts in flight per dense node, 1 to 4."""
    step_timeout: float = 300.0
    """Seconds a step may take before its requests fail. A node that then does not answer for as
    long again is ended, and so is one whose step has not ended after three times as long."""
    transfer_timeout: float = 60.0
    """Seconds a KV transfer may take after the first token before its request fails."""
    queue_timeout: float | None = None
    """Seconds a request may wait for a place, each time that it has none, before it fails; None: as
    long as it takes. One that no node could ever serve fails at once in any case."""

    def __post_init__(self) -> None:
        _int_at_least(
            "scheduler",
            self,
            1,
            "max_num_batched_tokens",
            "max_queue",
            "num_wavefronts",
        )
        if self.max_num_seqs is not None:
            _int_at_least("scheduler", self, 1, "max_num_seqs")
        _check(
            "scheduler", "num_wavefronts", self.num_wavefronts, self.num_wavefronts <= 4, "1 to 4"
        )
        ahead = self.async_scheduling
        good = ahead is None or isinstance(ahead, bool)
        _check("scheduler", "async_scheduling", ahead, good, "true, false or none")
        _positive("scheduler", self, "step_timeout", "transfer_timeout")
        if self.queue_timeout is not None:
            _positive("scheduler", self, "queue_timeout")

    @property
    def rows(self) -> int:
        """``max_num_seqs``; that of CPUs where it is not known yet."""
        return self.max_num_seqs or CPU_ROWS


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nodes, what runs them and what connects them."""

    topology: str = "pda"
    """colocated; pd (prefill | dense + attention); pda (prefill | dense | attention)."""
    executor: str = "ray"
    """local (threads), process (processes of this host), ray (actors)."""
    num_prefill_workers: int = 1
    """Prefill nodes (pd, pda)."""
    num_decode_dense_nodes: int = 1
    """Dense nodes (pd, where each holds attention too; pda)."""
    num_attention_nodes: int = 1
    """Attention nodes (pda)."""
    transport: str = "auto"
    """auto (the first that all nodes can use), inproc, cuda_ipc, shm, rdma, tcp, ray or
    nixl."""
    attention_backend: str = "auto"
    """auto (cuda where nodes are on a GPU, else cpu), cpu, cuda or torch."""
    prompt_attention: str = "auto"
    """What attends over prompts on GPUs: auto (what measured best: PyTorch's kernels for whole
    prompts where they pay, else our own), own, or a library of yours for rows of 64 query tokens
    and more, flash-attn or flashinfer, where it serves the layer."""
    batch_invariant: bool = False
    """Attention on GPUs with splits that depend on a request alone, and products of bfloat16 rows
    (compute capability 9.0), which do not depend on each other, so that a request's result does
    not change with those that it shares a batch with; slower. Other types and devices: attention
    only."""
    device: str = "auto"
    """Where nodes compute: cpu, cuda (the GPUs of each host, in turn), or cuda:N (that one); auto:
    cuda on hosts where PyTorch finds a GPU and this build has CUDA kernels, else cpu."""
    threads: int | None = None
    """Compute threads of each process; None: the cores it may use. Nodes of one process share them
    (local); nodes of different processes take turns by nature: one computes while others wait."""
    layer_loop: str = "auto"
    """auto (without Python where model, backend and transport offer it) or python, to compare."""
    start_timeout: float = 300.0
    """Seconds that all nodes together may take to start."""
    room_timeout: float = 0.0
    """Seconds to wait for the hosts of a Ray cluster to offer room for all nodes; 0: no waiting,
    and nodes run beside this process where no host offers any."""
    cache: CacheConfig = msgspec.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = msgspec.field(default_factory=SchedulerConfig)
    network: NetworkConfig = msgspec.field(default_factory=NetworkConfig)

    def __post_init__(self) -> None:
        for field, known in _CHOICES.items():
            value = getattr(self, field)
            _check("cluster", field, value, value in known, f"one of {', '.join(known)}")
        given = self.batch_invariant
        _check("cluster", "batch_invariant", given, isinstance(given, bool), "true or false")
        way = self.prompt_attention
        good = not given or way in ("auto", "own")
        _check("cluster", "prompt_attention", way, good, "auto or own with batch_invariant")
        _int_at_least(
            "cluster",
            self,
            1,
            "num_prefill_workers",
            "num_decode_dense_nodes",
            "num_attention_nodes",
        )
        if self.threads is not None:
            _int_at_least("cluster", self, 1, "threads")
            _check("cluster", "threads", self.threads, self.threads <= 4096, "at most 4096")
        _positive("cluster", self, "start_timeout")
        device = self.device
        good = isinstance(device, str) and _DEVICE.fullmatch(device) is not None
        _check("cluster", "device", device, good, "auto, cpu, cuda or cuda:N")
        wait = self.room_timeout
        good = isinstance(wait, (int, float)) and not isinstance(wait, bool) and 0 <= wait <= MOST
        _check("cluster", "room_timeout", wait, good, f"a number from 0 to {MOST}")
        _check(
            "cluster",
            "transport",
            self.transport,
            self.transport != "inproc" or self.executor == "local",
            "shm, tcp or ray where nodes are processes",
        )
