"""What a node is told when it is made; travels to other processes."""

from __future__ import annotations

import msgspec

from ..config.cluster import CacheConfig, ModelConfig
from ..config.network import NetworkConfig

PREFILL, DENSE, ATTENTION, DECODE, COLOCATED = (
    "prefill",
    "dense",
    "attention",
    "decode",
    "colocated",
)
"""Roles. ``decode`` is dense and attention in one node (topology pd)."""


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One node. ``dense_nodes`` and ``attention_nodes`` name all nodes of those roles in the
    order by which hop buffers are laid out."""

    name: str
    role: str
    model: ModelConfig
    cache: CacheConfig
    transport: str
    attention_backend: str
    threads: int
    lanes: int
    """Wavefronts of a dense node; 1 where there are none."""
    max_rows: int
    """Most rows of a step."""
    dense_nodes: tuple[str, ...] = ()
    attention_nodes: tuple[str, ...] = ()
    network: NetworkConfig = NetworkConfig()
    layer_loop: str = "auto"
    """See ``ClusterConfig``."""
    batch_invariant: bool = False
    """See ``ClusterConfig``."""
    prompt_attention: str = "auto"
    """See ``ClusterConfig``."""
    device: str = "cpu"
    """Where the node computes and its pool is: cpu, or cuda:N."""
    device_nodes: int = 1
    """Nodes of the cluster on that device, which share its memory."""
    device_halves: int = 1
    """Those of them that hold the weights."""
    max_tokens: int | None = None
    """Most tokens of a step; None: as many as a request may have."""

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
