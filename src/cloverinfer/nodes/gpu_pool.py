"""How large a pool a GPU has room for: measured once, when its node starts."""

from __future__ import annotations

import torch

from ..attention import create_backend
from ..kvcache.layout import KVSpec, PoolLayout, block_bytes
from ..models import ResolvedModel
from ..models.base import DenseHalf
from .config import NodeConfig
from .gpu import NodeDevice
from .largest_step import blocks_of, lengths_of, run_largest_step
from .memory import MemoryUse, graph_reserve, pool_budget

CALL_BYTES = 256 * 2**20
"""What a call takes on a node that only attends: its results and the kernels' workspace."""


def gpu_pool_budget(
    device: NodeDevice, config: NodeConfig, specs: tuple[KVSpec, ...], weights: int, step: int
) -> int:
    """Bytes of the pool; ``weights``: of the model, ``step``: what the node takes beside them.
    ``ConfigError`` with the numbers where nothing is left."""
    total = device.total()
    use = MemoryUse(
        total=total,
        utilization=config.cache.gpu_memory_utilization,
        nodes=config.device_nodes,
        weights=weights * config.device_halves,
        step=step,
        reserve=graph_reserve(total),
    )
    return pool_budget(use, block_bytes(specs, config.cache.block_size))


def largest_step_bytes(
    device: NodeDevice,
    config: NodeConfig,
    model: ResolvedModel,
    half: DenseHalf,
    specs: tuple[KVSpec, ...],
) -> int:
    """What the largest step of a node with ``half`` takes beside its weights and its pool."""
    most = config.max_tokens or model.max_model_len
    lengths = lengths_of(most, config.max_rows, model.max_model_len)
    size = config.cache.block_size
    with device.taking_memory(f"a step of {sum(lengths)} tokens"), torch.inference_mode():
        backend = create_backend(
            config.attention_backend,
            config.threads,
            config.batch_invariant,
            config.prompt_attention,
        )
        backend.allocate(PoolLayout(specs, size, blocks_of(lengths, size)), model.arch.num_heads)
        try:
            return device.peak_of(lambda: run_largest_step(half, backend, lengths, size))
        finally:
            backend.close()
