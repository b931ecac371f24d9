"""What two workers' couriers say to each other. Carries values only; knows no transfer's state.

Prefill greets decode at its meeting point and is told where blocks go. From then on both use the
data wire that was chosen there. ``KVChunk`` and the notices that prove it are those of every KV
transfer of CloverInfer.
"""

from __future__ import annotations

from typing import Union

import msgspec

from ...transport import RegionRef
from ...transport.choice import Offer
from ...wire.messages import KVChunk
from .grid import Grid, Heads

VERSION = 2
"""Of these messages; peers must have the same."""


class WireInfo(msgspec.Struct, frozen=True, array_like=True):
    """A worker's end of one transport."""

    address: str
    regions: list[RegionRef]
    grids: list[Grid]
    """Where blocks land that the wire cannot put into the cache itself, in place of the worker's;
    empty where it can."""


class Worker(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one worker must know of another."""

    version: int
    engine: str
    """The same for all workers of one engine, new at each start."""
    rank: int
    """In the engine's tensor parallelism."""
    ranks: int
    model: str
    """Fingerprint of its shape, or what the settings say."""
    dtype: str
    """Of the cache."""
    interior: str
    """How tokens lie within a head of a block; empty where strides say it all."""
    all_heads: int
    """KV heads of the model."""
    heads: Heads
    grids: list[Grid]
    """One for each layer that has a cache."""
    offer: Offer
    wires: dict[str, WireInfo]
    """By transport."""

    @property
    def name(self) -> str:
        return f"{self.engine}/{self.rank}"


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """To a meeting point, from a prefill worker."""

    nonce: int
    """Comes back with the answer."""
    worker: Worker


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The answer: the other worker, and the wire that both have."""

    nonce: int
    worker: Worker
    transport: str


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    """The answer: the two do not fit, and why."""

    nonce: int
    reason: str


class Claim(msgspec.Struct, frozen=True, array_like=True, tag="claim"):
    """From prefill: give me the blocks of this transfer."""

    transfer: str
    attempt: int
    end: int
    """Length of the prompt."""
    digest: int
    """Of its tokens."""


class Grant(msgspec.Struct, frozen=True, array_like=True, tag="grant"):
    """From decode: push positions ``start`` to ``end - 1`` into these blocks."""

    transfer: str
    attempt: int
    slot: int
    """By which notices name the transfer."""
    number: int
    """By which chunks name it."""
    blocks: list[int]
    """Of decode's grids."""
    start: int
    end: int


class Denial(msgspec.Struct, frozen=True, array_like=True, tag="denial"):
    """From decode: this attempt will not be granted."""

    transfer: str
    attempt: int
    reason: str


class Drop(msgspec.Struct, frozen=True, array_like=True, tag="drop"):
    """From decode: put nothing more into the blocks of this slot, and say when nothing is on its
    way any more."""

    slot: int
    transfer: str
    attempt: int


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="dropped"):
    """From prefill: nothing is."""

    slot: int


class GiveUp(msgspec.Struct, frozen=True, array_like=True, tag="give-up"):
    """From prefill: this attempt ends here."""

    transfer: str
    attempt: int
    reason: str
    final: bool
    """No other attempt would fare better."""


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """I live."""


Message = Union[
    Greeting, Welcome, Refusal, Claim, Grant, Denial, Drop, Dropped, GiveUp, Beat, KVChunk
]

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes) -> Message:
    """Raises ``msgspec.ValidationError`` or ``msgspec.DecodeError`` on anything else."""
    return _decoder.decode(data)
