"""Flags that commands share, as configuration keys; nothing here runs anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from ..config import (
    CacheConfig,
    ClusterConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    load_config,
)
from ..config.cluster import (
    ATTENTION_BACKENDS,
    CPU_ROWS,
    DTYPES,
    EXECUTORS,
    GPU_ROWS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    LOWERINGS,
    MODEL_IMPLS,
    PROMPT_ATTENTIONS,
    QUANTIZATIONS,
    TOPOLOGIES,
    TRANSPORTS,
)
from ..config.network import CHECKSUMS, NetworkConfig

DEFAULTS = {"cluster": {"executor": "local"}}
"""What a command starts from where the records say otherwise: no Ray unless asked for."""


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="YAML settings; flags win over them")
    _add_model(parser)
    _add_cluster(parser)
    _add_limits(parser)
    _add_network(parser)


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = ModelConfig()
    group = parser.add_argument_group("model")
    text = f"known name, Hugging Face directory or GGUF file (default: {model.model_path})"
    option(group, "--model", "model.model_path", text)
    text = "of weights, arithmetic and KV cache; auto: bfloat16 on GPUs, where the processor "
    text += "multiplies it natively and, with AVX2 but no AVX-512, for models of Llama's family "
    text += f"that are not compiled, else float32 (default: {model.dtype})"
    option(group, "--dtype", "model.dtype", text, choices=DTYPES)
    text = "of the prefill nodes, whose blocks are converted (default: as --dtype)"
    option(group, "--prefill-dtype", "model.prefill_dtype", text, choices=DTYPES)
    text = "of matrices: on CPUs int8 (made at load) or gguf (as the file has them), on GPUs fp8 "
    text += "(made at load; on a CPU a slow reference) (default: none)"
    option(group, "--quantization", "model.quantization", text, choices=QUANTIZATIONS)
    text = f"form of the weights; auto: what is there (default: {model.load_format})"
    option(group, "--load-format", "model.load_format", text, choices=LOAD_FORMATS)
    text = (
        "dense half: ours for the family, or compiled from transformers' model; auto: ours where "
    )
    text += f"there is one (default: {model.model_impl})"
    option(group, "--model-impl", "model.model_impl", text, choices=MODEL_IMPLS)
    text = f"how a compiled model's stages run (default: {model.lowering})"
    option(group, "--lowering", "model.lowering", text, choices=LOWERINGS)
    text = "longest prompt + output in tokens (default: the model's own)"
    option(group, "--max-model-len", "model.max_model_len", text, int)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    cluster = ClusterConfig()
    group = parser.add_argument_group("cluster")
    text = "prefill | dense | attention apart, prefill | rest, or all in one node "
    text += f"(default: {cluster.topology})"
    option(group, "--topology", "cluster.topology", text, choices=TOPOLOGIES)
    text = f"what runs the nodes (default: {DEFAULTS['cluster']['executor']})"
    option(group, "--executor", "cluster.executor", text, choices=EXECUTORS)
    text = "prefill nodes of pd and pda (default: 1)"
    option(group, "--prefill", "cluster.num_prefill_workers", text, int)
    text = "dense nodes of pd and pda (default: 1)"
    option(group, "--dense", "cluster.num_decode_dense_nodes", text, int)
    text = "attention nodes of pda (default: 1)"
    option(group, "--attention", "cluster.num_attention_nodes", text, int)
    text = (
        f"what carries tensors; auto: the best that all nodes have (default: {cluster.transport})"
    )
    option(group, "--transport", "cluster.transport", text, choices=TRANSPORTS)
    text = "what attends; auto: the best for the nodes' devices "
    text += f"(default: {cluster.attention_backend})"
    option(
        group, "--attention-backend", "cluster.attention_backend", text, choices=ATTENTION_BACKENDS
    )
    text = "what attends over prompts on GPUs; auto: what measured best "
    text += f"(default: {cluster.prompt_attention})"
    option(group, "--prompt-attention", "cluster.prompt_attention", text, choices=PROMPT_ATTENTIONS)
    text = (
        "attention and bfloat16 products on GPUs whose results do not change with the batch; slower"
    )
    switch(group, "--batch-invariant", "cluster.batch_invariant", text, "off")
    text = "auto, cpu, cuda or cuda:N; auto: GPUs where there are any "
    text += f"(default: {cluster.device})"
    option(group, "--device", "cluster.device", text)
    text = "compute threads of each process (default: the cores it may use)"
    option(group, "--threads", "cluster.threads", text, int)
    text = f"seconds that the nodes may take to start (default: {cluster.start_timeout:g})"
    option(group, "--start-timeout", "cluster.start_timeout", text, float)
    text = "seconds to wait for the hosts of a Ray cluster to offer room for all nodes "
    text += f"(default: {cluster.room_timeout:g})"
    option(group, "--room-timeout", "cluster.room_timeout", text, float)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    cache, limits = CacheConfig(), SchedulerConfig()
    group = parser.add_argument_group("cache and scheduler")
    text = f"tokens per block (default: {cache.block_size})"
    option(group, "--block-size", "cache.block_size", text, int)
    text = "of the prefill nodes, whose blocks are converted (default: as --block-size)"
    option(group, "--prefill-block-size", "cache.prefill_block_size", text, int)
    text = "of stored keys and values; auto: as --dtype; int8: scaled by token and head, on CPUs; "
    text += "fp8: on GPUs "
    text += f"(default: {cache.kv_cache_dtype})"
    option(group, "--kv-cache-dtype", "cache.kv_cache_dtype", text, choices=KV_CACHE_DTYPES)
    text = "KV pool of each attention node in GiB (default: 1; on a GPU, what is left of it)"
    option(group, "--memory-gib", "cache.memory_gib", text, float)
    text = "share of a GPU's memory, for weights, steps and pools of all nodes on it "
    text += f"(default: {cache.gpu_memory_utilization:g})"
    option(group, "--gpu-memory-utilization", "cache.gpu_memory_utilization", text, float)
    text = "blocks per pool (default: by --memory-gib or --gpu-memory-utilization)"
    option(group, "--num-blocks", "cache.num_blocks", text, int)
    switch(
        group, "--enable-prefix-caching", "cache.enable_prefix_caching", "keep full blocks findable"
    )
    text = f"requests decoded at a time (default: {CPU_ROWS}, on GPUs {GPU_ROWS})"
    option(group, "--max-num-seqs", "scheduler.max_num_seqs", text, int)
    text = f"token budget of one forward (default: {limits.max_num_batched_tokens})"
    option(group, "--max-num-batched-tokens", "scheduler.max_num_batched_tokens", text, int)
    text = f"requests that may wait (default: {limits.max_queue})"
    option(group, "--max-queue", "scheduler.max_queue", text, int)
    text = "seconds that a request may wait for a place (default: as long as it takes)"
    option(group, "--queue-timeout", "scheduler.queue_timeout", text, float)
    text = f"seconds that a step may take, and a node to answer (default: {limits.step_timeout:g})"
    option(group, "--step-timeout", "scheduler.step_timeout", text, float)
    text = f"micro-batches in flight, 1 to 4 (default: {limits.num_wavefronts})"
    option(group, "--num-wavefronts", "scheduler.num_wavefronts", text, int)
    text = "split long prompts"
    switch(group, "--enable-chunked-prefill", "scheduler.enable_chunked_prefill", text)
    text = "send each step while the one before it is computed"
    switch(group, "--async-scheduling", "scheduler.async_scheduling", text, "on GPUs")


def _add_network(parser: argparse.ArgumentParser) -> None:
    network = NetworkConfig()
    group = parser.add_argument_group("network")
    text = f"address that wires between hosts listen at (default: {network.bind_host})"
    option(group, "--bind-host", "network.bind_host", text)
    text = "address that peers are told (default: where it listens)"
    option(group, "--advertise-host", "network.advertise_host", text)
    text = f"connections per peer over tcp (default: {network.tcp_streams})"
    option(group, "--tcp-streams", "network.tcp_streams", text, int)
    text = f"of KV transfers, checked by the receiver (default: {network.checksum})"
    option(group, "--checksum", "network.checksum", text, choices=CHECKSUMS)
    text = f"MiB to take blocks in that must be converted (default: {network.staging_mib})"
    option(group, "--staging-mib", "network.staging_mib", text, int)


def option(
    group: Any,
    flag: str,
    key: str,
    text: str,
    kind: Callable[[str], Any] = str,
    choices: tuple[str, ...] | None = None,
) -> None:
    """A flag that sets a configuration key; None means that it was not given."""
    metavar = None if choices else {int: "N", float: "X"}.get(kind, "TEXT")  # type: ignore[call-overload]
    group.add_argument(flag, dest=key, type=kind, choices=choices, metavar=metavar, help=text)


def option_list(group: Any, flag: str, key: str, text: str) -> None:
    """A flag that takes several strings, or one that is a JSON list of them."""
    group.add_argument(flag, dest=key, nargs="+", metavar="TEXT", help=text)


def switch(group: Any, flag: str, key: str, text: str, default: str = "on") -> None:
    action = argparse.BooleanOptionalAction
    group.add_argument(flag, dest=key, action=action, help=f"{text} (default: {default})")


def config_of(args: argparse.Namespace) -> Config:
    """The settings in force, from flags, environment and file."""
    overrides: dict[str, dict[str, Any]] = {}
    for key, value in vars(args).items():
        section, dot, field = key.partition(".")
        if dot and value is not None:
            listed = _flat(value) if isinstance(value, list) else value
            overrides.setdefault(section, {})[field] = listed
    return load_config(args.config, overrides, defaults=DEFAULTS)


def _flat(values: list[str]) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        try:
            parsed = json.loads(value) if value.startswith("[") else value
        except ValueError:
            parsed = value  # a name that begins with a bracket
        flat += parsed if isinstance(parsed, list) else [parsed]
    return flat
