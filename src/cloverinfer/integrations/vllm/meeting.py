"""Whether two workers fit, how their pieces match, and over which wire they go.

Pure functions of what two ``Worker`` records say.
"""

from __future__ import annotations

import msgspec

from ...core.errors import ConfigError
from ...transport.choice import ORDER, reason_against
from .grid import Match, match
from .wire import Worker

_SAME = {
    "version": "version of the connector",
    "model": "model",
    "dtype": "type of the KV cache",
    "interior": "layout of the KV cache within a block",
    "all_heads": "KV heads of the model",
}


def matches_of(prefill: Worker, decode: Worker) -> list[Match]:
    """One for each layer, from prefill's pieces to decode's; none where the two share no heads.
    ``ConfigError`` naming what differs and both values."""
    for field, what in _SAME.items():
        mine, theirs = getattr(prefill, field), getattr(decode, field)
        if mine != theirs:
            raise ConfigError(f"{what}: {mine} at prefill and {theirs} at decode")
    if len(prefill.grids) != len(decode.grids):
        raise ConfigError(
            f"layers with a cache: {len(prefill.grids)} at prefill and "
            f"{len(decode.grids)} at decode"
        )
    if prefill.ranks != decode.ranks and _replicated(prefill, decode):
        raise ConfigError(
            f"tensor parallelism: {prefill.ranks} at prefill and {decode.ranks} at decode, where "
            f"the model's {prefill.all_heads} KV heads are kept several times: make them equal"
        )
    if prefill.heads.shared_with(decode.heads) is None:
        return []
    return [
        match(mine, theirs, prefill.heads, decode.heads)
        for mine, theirs in zip(prefill.grids, decode.grids, strict=True)
    ]


def landed(worker: Worker, transport: str) -> Worker:
    """As what comes over that wire finds it."""
    grids = worker.wires[transport].grids
    return msgspec.structs.replace(worker, grids=grids) if grids else worker


def _replicated(prefill: Worker, decode: Worker) -> bool:
    return any(one.ranks * one.heads.count > one.all_heads for one in (prefill, decode))


def partners(rank: int, ranks: int, others: int) -> list[int]:
    """Ranks of an engine of ``others`` workers that share KV heads with ``rank`` of ``ranks``;
    the same rank where both have as many."""
    if ranks == others:
        return [rank]
    return [
        other
        for other in range(others)
        if other * ranks < (rank + 1) * others and (other + 1) * ranks > rank * others
    ]


def wire_between(a: Worker, b: Worker) -> str:
    """The first of the order that both have, those last that need copies; ``ConfigError`` with the
    reasons where none is."""
    reasons = []
    staged = {name for worker in (a, b) for name, info in worker.wires.items() if info.grids}
    for transport in sorted(ORDER, key=lambda name: name in staged):
        if transport not in a.wires or transport not in b.wires:
            continue
        reason = reason_against(transport, [(a.offer, b.offer)])
        if not reason:
            return transport
        reasons.append(f"{transport}: {reason}")
    have = f"{', '.join(a.wires)} and {', '.join(b.wires)}"
    raise ConfigError(f"no common wire among {have}{'; ' if reasons else ''}{'; '.join(reasons)}")
