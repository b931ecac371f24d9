"""What the 32 bits of a notice say. Two kinds, told apart by the top bit.

hop (0): lane 4 bits, step (mod 2^17) 17 bits, layer 10 bits
KV  (1): transfer slot 21 bits, layer 10 bits

Who sent it is known from the peer it came from.
"""

from __future__ import annotations

from typing import NamedTuple

LAYER_BITS = 10
STEP_BITS = 17
LANE_BITS = 4
TRANSFER_BITS = 21
MAX_LAYERS = 1 << LAYER_BITS
MAX_TRANSFERS = 1 << TRANSFER_BITS
STEP_MASK = (1 << STEP_BITS) - 1
_KV = 1 << 31


class HopNotice(NamedTuple):
    """Queries, keys and values (or attention output) of one wavefront and layer are in place."""

    lane: int
    step: int
    """Step number modulo 2^17."""
    layer: int


class KVNotice(NamedTuple):
    """One layer's blocks of the transfer's current chunk are in place."""

    transfer: int
    layer: int


def pack_hop(lane: int, step: int, layer: int) -> int:
    return lane << (STEP_BITS + LAYER_BITS) | (step & STEP_MASK) << LAYER_BITS | layer


def pack_kv(transfer: int, layer: int) -> int:
    return _KV | transfer << LAYER_BITS | layer


def unpack(notice: int) -> HopNotice | KVNotice:
    layer = notice & (MAX_LAYERS - 1)
    if notice & _KV:
        return KVNotice((notice & ~_KV) >> LAYER_BITS, layer)
    step = notice >> LAYER_BITS & STEP_MASK
    return HopNotice(notice >> (LAYER_BITS + STEP_BITS), step, layer)
