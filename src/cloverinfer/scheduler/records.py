"""What the scheduler takes and gives besides messages: nodes, token events, step records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..core.errors import ConfigError
from ..core.logprobs import TokenLogprobs
from ..core.request import Request

TOPOLOGY_ROLES = {
    "colocated": frozenset({"colocated"}),
    "pd": frozenset({"prefill", "decode"}),
    "pda": frozenset({"prefill", "dense", "attention"}),
}
POOL_ROLES = frozenset({"colocated", "prefill", "decode", "attention"})
"""Roles with a KV pool."""
HOME_ROLES = frozenset({"colocated", "decode", "attention"})
"""Roles whose pool a request lives in while it decodes."""
DENSE_ROLES = frozenset({"colocated", "decode", "dense"})
"""Roles that run decode rows."""
AHEAD_ROLES = frozenset({"colocated", "decode"})
"""Roles whose nodes may be sent a step while another is computed."""


@dataclass(frozen=True)
class SchedNode:
    """A started node as the scheduler sees it."""

    name: str
    role: str
    """colocated, prefill, decode (dense + attention), dense or attention."""
    kv_blocks: int
    """Blocks of its pool; 0 without one."""
    block_size: int | None = None
    """Tokens per block of its pool; None: as the cache's configuration says."""
    device: str = "cpu"
    """Where it computes."""


@dataclass(frozen=True)
class HungNode:
    """A node that stands still, to be ended."""

    name: str
    reason: str


class TokenEvent(NamedTuple):
    """A request's next token, in order."""

    request: Request
    token: int
    finished: bool
    """It was the last one; ``request.finish_reason`` says why."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True)
class StepRecord:
    """What one plan was like."""

    time: float
    """When it was made, in clock seconds."""
    node: str
    lane: int
    step: int
    batch: int
    """Rows."""
    decode_rows: int
    """Rows whose request had been given its first token before."""
    tokens: int
    """Tokens that the step computes."""
    joins: int
    leaves: int
    wait_seconds: float
    """How long the lane had stood still since its last step although it had rows to decode."""


def topology_of(nodes: list[SchedNode]) -> str:
    """The topology that these nodes make; ``ConfigError`` where they make none."""
    roles = frozenset(node.role for node in nodes)
    topology = next((name for name, r in TOPOLOGY_ROLES.items() if r == roles), None)
    if topology is None:
        known = "; ".join(f"{name}: {', '.join(sorted(r))}" for name, r in TOPOLOGY_ROLES.items())
        given = ", ".join(sorted(roles)) or "none"
        raise ConfigError(f"nodes of roles {given} make no topology; known are {known}")
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        raise ConfigError(f"node names must differ, not {', '.join(names)}")
    for node in nodes:
        if node.role in POOL_ROLES and node.kv_blocks < 1:
            raise ConfigError(f"node {node.name} needs a pool of at least one block")
    return topology
