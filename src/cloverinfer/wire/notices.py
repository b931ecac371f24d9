"""What the 32 bits of a notice say. Two kinds, told apart by the top bit.

hop (0): lane 4 bits, step (mod 2^17) 17 bits, layer 10 bits
KV  (1): transfer slot 17 bits, chunk (mod 2^4) 4 bits, layer 10 bits

Who sent it is known from the peer it came from.
"""

from __future__ import annotations

from typing import NamedTuple

LAYER_BITS = 10
STEP_BITS = 17
LANE_BITS = 4
TRANSFER_BITS = 17
CHUNK_BITS = 4
MAX_LAYERS = 1 << LAYER_BITS
MAX_TRANSFERS = 1 << TRANSFER_BITS
STEP_MASK = (1 << STEP_BITS) - 1
CHUNK_MASK = (1 << CHUNK_BITS) - 1
_KV = 1 << 31


class HopNotice(NamedTuple):
    """Queries, keys and values (or attention output) of one wavefront and layer are in place."""

    lane: int
    step: int
    """Step number modulo 2^17."""
    layer: int


class KVNotice(NamedTuple):
    """One layer's blocks of one chunk of a transfer are in place."""

    transfer: int
    chunk: int
    """Number of the chunk in its transfer, modulo 2^4: a notice that comes twice is known by it."""
    layer: int


def pack_hop(lane: int, step: int, layer: int) -> int:
    return lane << (STEP_BITS + LAYER_BITS) | (step & STEP_MASK) << LAYER_BITS | layer


def pack_kv(transfer: int, chunk: int, layer: int) -> int:
    slot = transfer << CHUNK_BITS | (chunk & CHUNK_MASK)
    return _KV | slot << LAYER_BITS | layer


def unpack(notice: int) -> HopNotice | KVNotice:
    layer = notice & (MAX_LAYERS - 1)
    if notice & _KV:
        slot = (notice & ~_KV) >> LAYER_BITS
        return KVNotice(slot >> CHUNK_BITS, slot & CHUNK_MASK, layer)
    step = notice >> LAYER_BITS & STEP_MASK
    return HopNotice(notice >> (LAYER_BITS + STEP_BITS), step, layer)
