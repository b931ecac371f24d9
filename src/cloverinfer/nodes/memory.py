"""A GPU's memory as numbers: what a pool may take of it, and what to say where it does not do.

Knows no device: whoever calls has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..core.errors import ConfigError

GIB = float(2**30)
WHAT_TO_LOWER = (
    "lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or the weights' type "
    "(model.dtype)"
)
_RESERVE, _RESERVE_SHARE = 2**30, 0.02


def graph_reserve(total: int) -> int:
    """Bytes of a device of ``total`` bytes that are left for captured graphs and what libraries
    allocate for themselves."""
    return min(_RESERVE, int(total * _RESERVE_SHARE))


@dataclass(frozen=True)
class MemoryUse:
    """Of one node; in bytes where nothing else is said."""

    total: int
    """Of the device."""
    utilization: float
    """Share of it that the nodes on it may use together."""
    nodes: int
    """On the device; what the weights leave is theirs in equal parts."""
    weights: int
    """Of all nodes on the device."""
    step: int
    """What the node's largest step takes beside weights and pool."""
    reserve: int

    @property
    def usable(self) -> int:
        """What all nodes may use."""
        return int(self.total * self.utilization)

    @property
    def part(self) -> int:
        """What the node may use beside its weights."""
        return (self.usable - self.weights) // self.nodes

    @property
    def left(self) -> int:
        """Of its part, for the pool; negative where there is too little for the rest."""
        return self.part - self.step - self.reserve


def pool_budget(use: MemoryUse, least: int) -> int:
    """Bytes of the pool; ``ConfigError`` with the numbers where not even ``least`` are left."""
    if use.left >= least:
        return use.left
    shared = f" for each of {use.nodes} nodes" if use.nodes > 1 else ""
    raise ConfigError(
        f"no room for a KV pool: cache.gpu_memory_utilization {use.utilization:g} of "
        f"{_gib(use.total)} GiB are {_gib(use.usable)} GiB, of which weights take "
        f"{_gib(use.weights)} and leave {_gib(use.part)} GiB{shared}; a step takes "
        f"{_gib(use.step)}, the reserve for graphs {_gib(use.reserve)} GiB, and a block "
        f"{least / 2**20:.2f} MiB: raise gpu_memory_utilization, or {WHAT_TO_LOWER}"
    )


def out_of_memory(device: str, doing: str, free: int, total: int, own: int) -> str:
    """What to say where ``doing`` found too little; ``own``: what this process holds there."""
    others = max(0, total - free - own)
    return (
        f"{device} has too little memory for {doing}: {_gib(free)} of {_gib(total)} GiB are free, "
        f"{_gib(own)} GiB are this process's, {_gib(others)} GiB others': lower "
        "cache.gpu_memory_utilization, cache.memory_gib or cache.num_blocks where they are the "
        f"pool's, or {WHAT_TO_LOWER}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f}"
