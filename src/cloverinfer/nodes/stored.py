"""The type that a node's keys and values are stored in."""

from __future__ import annotations

from ..core.errors import ConfigError
from .config import NodeConfig

_FP8 = "float8_e4m3"


def stored_dtype(config: NodeConfig, dtype: str) -> str:
    """``KVSpec.dtype`` of a node that computes in ``dtype``; ``ConfigError`` where its device does
    not store what is asked for."""
    wanted = config.cache.kv_cache_dtype
    if wanted == "auto":
        return dtype
    if wanted != "fp8":
        if config.on_gpu and wanted != dtype:
            raise ConfigError(
                f"cache.kv_cache_dtype {wanted}: on GPUs it is auto, the model's type ({dtype}) "
                f"or fp8: leave it out, or set cluster.device cpu"
            )
        return wanted
    if not config.on_gpu:
        raise ConfigError(
            "cache.kv_cache_dtype fp8 needs nodes on GPUs: use int8 on CPUs, or leave it out"
        )
    if dtype == "float32":
        raise ConfigError(
            "cache.kv_cache_dtype fp8 needs model.dtype bfloat16 or float16, not float32"
        )
    return _FP8
