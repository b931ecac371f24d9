"""What vLLM's configuration says of this engine, in the connector's own words.

Reads vLLM's objects by their attributes; imports nothing of it. ``ConfigError`` for what the
connector does not serve, with what to do about it.
"""

from __future__ import annotations

import platform
import uuid
from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import ConfigError
from .memory import Shape
from .worker import Engine

_SHAPE_KEYS = (
    "architectures",
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rope_theta",
    "sliding_window",
)
"""What tells models apart whose caches must not mix."""


def check_config(config: Any) -> None:
    """``config``: vLLM's whole configuration. ``ConfigError`` for what this connector cannot do."""
    parallel = config.parallel_config
    for field in (
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel, field, 1)
        if size > 1:
            raise ConfigError(f"{field} is {size}: this connector serves 1 only")
    if getattr(parallel, "use_ubatching", False) or getattr(parallel, "enable_dbo", False):
        raise ConfigError(
            "micro-batches (--enable-dbo) compute a layer several times in a step, which this "
            "connector does not follow: switch them off"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "--calculate-kv-scales: each instance would find scales of its own for the same KV "
            "cache; switch it off, or use a model that comes with scales"
        )


def block_size_of(config: Any, cache: Any) -> int:
    """Tokens of a block as vLLM's scheduler counts; ``cache``: its KV cache configuration, or
    None."""
    if cache is None or not cache.kv_cache_groups:
        return int(config.cache_config.block_size)
    if len(cache.kv_cache_groups) > 1:
        raise ConfigError(
            f"the model has {len(cache.kv_cache_groups)} groups of layers with block tables of "
            "their own: start vLLM with --disable-hybrid-kv-cache-manager"
        )
    return int(cache.kv_cache_groups[0].kv_cache_spec.block_size)


def engine_of(config: Any, cache: Any, rank: int, caches: Mapping[str, Any]) -> Engine:
    """``caches``: the engine's tensors by layer; ``rank``: in tensor parallelism. ``ConfigError``
    for memory that the engine may take away."""
    ranks = config.parallel_config.tensor_parallel_size
    tensor = next(iter(caches.values()))
    block_size = block_size_of(config, cache)
    blocks = cache.num_blocks if cache is not None else config.cache_config.num_gpu_blocks
    heads = _heads(cache, tensor)
    on_cpu = getattr(tensor, "device", torch.device("cpu")).type == "cpu"
    if not on_cpu and getattr(config.model_config, "enable_sleep_mode", False):
        raise ConfigError(
            "--enable-sleep-mode takes the KV cache's memory away, in which peers may be writing: "
            "switch it off"
        )
    engine_id = config.kv_transfer_config.engine_id
    return Engine(
        # Fresh even where a user fixed the id: a restart must not pass for the one before.
        name=engine_id if ranks > 1 else f"{engine_id}-{uuid.uuid4().hex[:8]}",
        rank=rank,
        ranks=ranks,
        model=_model(config.model_config),
        dtype=_dtype(config, tensor),
        interior=_cpu_interior(tensor.dtype) if on_cpu else "",
        all_heads=config.model_config.get_total_num_kv_heads(),
        shape=Shape(int(blocks), block_size, heads, opaque=on_cpu),
    )


def _heads(cache: Any, tensor: Any) -> int:
    if cache is not None and cache.kv_cache_groups:
        spec = cache.kv_cache_groups[0].kv_cache_spec
        if hasattr(spec, "num_kv_heads"):
            return int(spec.num_kv_heads)
    return int(tensor.shape[1]) if len(tensor.shape) == 4 else 1


def _model(model: Any) -> str:
    shape = getattr(model, "hf_text_config", model.hf_config)
    values = {key: getattr(shape, key, None) for key in _SHAPE_KEYS}
    return ", ".join(f"{key}={value}" for key, value in values.items() if value is not None)


def _dtype(config: Any, tensor: Any) -> str:
    named = str(config.cache_config.cache_dtype)
    return str(tensor.dtype).removeprefix("torch.") if named == "auto" else named


def _cpu_interior(dtype: torch.dtype) -> str:
    """vLLM's CPU kernels lay keys out for the instructions that they use."""
    wide = torch.cpu._is_avx512_supported()
    tiles = dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    return f"cpu {platform.machine()}{' avx512' if wide else ''}{' amx' if tiles else ''}"
