"""The contract of an attention backend: it owns a paged KV pool, appends to it, attends over it.

It does not know requests, steps or wires: rows come as block tables and lengths.

Shapes: t tokens of the call, r rows (requests of the call), h query heads, n KV heads,
d the key size, e the value size, b blocks of the longest row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from .. import _native
from ..kvcache.layout import PoolLayout
from ..transport.base import DeviceMemory


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; each field with its consequence."""

    name: str
    device: str
    """torch device type of the tensors it takes and returns."""
    dtypes: tuple[str, ...]
    """KV types it stores; any other is refused by ``allocate``."""
    direct_puts: bool
    """The pool is in the canonical layout, so peers may put blocks straight into it."""
    computes: bool = True
    """False: results are zeros (the null backend)."""
    features: frozenset[str] = frozenset()
    """Of ``window``, ``softcap``, ``sinks``, ``alibi``; a spec asking for another is refused."""
    converts: bool = False
    """Queries, keys and values may be of any float type, whatever is stored; else of that type."""
    checks_late: bool = False
    """A block or slot outside the pool is not followed, and is an error of the next call only."""


@dataclass(frozen=True)
class NativeAttention:
    """A backend's ``append`` and ``attend`` as a table of C functions, while it is open."""

    table: _native.AttentionTable
    max_queries: int
    """Most query tokens of a row."""


HostRows = tuple[torch.Tensor, torch.Tensor]
"""``query_starts`` and ``lengths`` in the host's memory."""


class AttentionBackend(ABC):
    """Lifetime: ``allocate`` once, then any number of calls from one thread, then ``close``.

    Appending is idempotent by position: writing a slot again replaces it. Blocks that no row
    of a call names are never read, whatever they hold.
    """

    capabilities: Capabilities

    @abstractmethod
    def allocate(
        self, layout: PoolLayout, num_heads: int, buffer: memoryview | DeviceMemory | None = None
    ) -> None:
        """Makes the pool of ``layout.total_bytes`` bytes, in ``buffer`` where one is given
        (writable, page-aligned, at least that long; it must outlive the backend; of the device
        where the backend's tensors are).

        ``num_heads``: query heads, a multiple of every layer's ``kv_heads``. Raises
        ``ConfigError`` naming the field and what is allowed for a spec it cannot serve.
        """

    @abstractmethod
    def append(
        self, layer: int, k_tnd: torch.Tensor, v_tne: torch.Tensor, slots_t: torch.Tensor
    ) -> None:
        """Stores keys and values; ``slots_t`` int64, ``block * block_size + offset``.

        ``k_tnd`` and ``v_tne`` are of the stored type, or of one type that the backend converts
        from (``Capabilities.converts``); heads and elements are contiguous within
        a token, the token stride is free.
        """

    @abstractmethod
    def attend(
        self,
        layer: int,
        q_thd: torch.Tensor,
        query_starts: torch.Tensor,
        block_tables_rb: torch.Tensor,
        lengths_r: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention of each row's query tokens over that row's cache.

        ``query_starts`` int32 ``[r + 1]``: row i's query tokens are ``q[starts[i]:starts[i+1]]``,
        at least one each. ``lengths_r`` int32: tokens in the cache, the query tokens (already
        appended) included; the last query token is at position ``length - 1``.
        ``block_tables_rb`` int32; entries past a row's length are never read.
        Returns ``o_the`` in q's type and ``lse_th`` float32, the log of the softmax's
        denominator (with sinks counted), by which partial results merge.
        """

    def plan(self, rows: HostRows, lengths_r: torch.Tensor | None) -> None:
        """Before a step's layers, by a caller whose tensors are on a device: the rows as the host
        knows them, so that no ``attend`` with the same ``lengths_r`` waits to read them. None:
        the step is a captured graph, which makes no calls. A backend that finds out late
        (``Capabilities.checks_late``) raises ``ValueError`` here for what earlier steps named.
        """
        del rows, lengths_r  # a backend of the host has nothing to prepare

    @abstractmethod
    def export_blocks(self, blocks: list[int]) -> torch.Tensor:
        """Bytes of whole blocks in the canonical layout: uint8 ``[layers][block][bytes]``, flat."""

    @abstractmethod
    def import_blocks(self, blocks: list[int], data: torch.Tensor) -> None:
        """The reverse of ``export_blocks``; ``ValueError`` when the size does not fit."""

    @abstractmethod
    def close(self) -> None:
        """Gives the pool back; calling it twice is fine."""

    def native(self) -> NativeAttention | None:
        """For a layer loop without Python, once allocated; None where the backend has none."""
        return None


@dataclass(frozen=True)
class FusedRows:
    """Queries, keys and values as one product leaves them, and how they are to be rotated.

    h query heads, n KV heads, d their size, p positions of a table.
    """

    qkv_thd: torch.Tensor
    """``[t, h + 2n, d]``; contiguous within a token."""
    kv_heads: int
    positions_t: torch.Tensor
    """int64."""
    rope: tuple[torch.Tensor, torch.Tensor]
    """cos and sin ``[p, 1, d]``: ``y = x * cos[position] + roll(x, d / 2) * sin[position]``. Only
    their second halves are read: of cos the first is the same, of sin the same negated."""
    norm_hd: torch.Tensor | None = None
    """Weights ``[h + n, d]`` of a norm of each query and key before; None: there is none."""
    eps: float = 0.0

    @property
    def parts(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views: queries, keys, values."""
        heads = self.qkv_thd.shape[1] - 2 * self.kv_heads
        sizes = heads, self.kv_heads, self.kv_heads
        q, k, v = torch.split_with_sizes(self.qkv_thd, sizes, 1)
        return q, k, v


class RotatesOnAppend(ABC):
    """A backend that can also take rows before they are rotated, which saves a launch."""

    @abstractmethod
    def append_rotated(self, layer: int, rows: FusedRows, slots_t: torch.Tensor) -> torch.Tensor:
        """Stores the rows' keys, rotated, and values as ``append`` does; returns the queries
        ``[t, h, d]``, rotated where they are. Keys and values of ``rows`` may be left as they were.
        """
