"""Block tables of requests over one pool, and reuse of prefixes between them.

It knows requests by number and tokens as integers; it knows no node, no step and no memory. Who
calls it must not free what a step in flight still names, and confirms only what was computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .layout import blocks_for
from .pool import BlockPool
from .prefix import extend_keys


@dataclass(frozen=True)
class Match:
    """Blocks of a pool that hold a prefix already."""

    blocks: tuple[int, ...]
    num_tokens: int
    num_free: int
    """How many of ``blocks`` are on the free list now: reviving them takes them from it."""


@dataclass
class CacheStats:
    """Counts since the start, in tokens."""

    queries: int = 0
    """Tokens that were looked up when blocks were allocated."""
    hits: int = 0
    """Tokens of them that a cached block held."""


@dataclass
class _Table:
    blocks: list[int]
    num_confirmed: int
    """Leading full blocks whose keys were given to the pool."""
    keys: list[bytes] = field(default_factory=list)
    """Chained keys of leading blocks, as far as they are known."""


class KVCacheManager:
    """The tables over one pool of ``num_blocks`` blocks of ``block_size`` tokens."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.caching = enable_prefix_caching
        self.stats = CacheStats()
        self._tables: dict[int, _Table] = {}
        self._num_withheld = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks, the cached ones included."""
        return self.pool.num_free

    def keys(self, token_ids: Sequence[int], salt: str | None = None) -> list[bytes]:
        """Keys of the full blocks of ``token_ids``, the same for every pool of this block size;
        empty with caching off. Blocks are shared between requests of one ``salt`` only. Passing
        the keys to the methods below spares computing them again.
        """
        keys: list[bytes] = []
        if self.caching:
            count = len(token_ids) // self.block_size
            extend_keys(keys, token_ids, self.block_size, count, salt)
        return keys

    def match_prefix(
        self,
        token_ids: Sequence[int],
        limit: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> Match:
        """The longest prefix of ``token_ids`` held in full blocks, at most ``limit`` tokens."""
        limit = len(token_ids) if limit is None else min(limit, len(token_ids))
        known = self.keys(token_ids) if keys is None else keys
        blocks: list[int] = []
        for key in known[: max(limit, 0) // self.block_size] if self.caching else ():
            block = self.pool.lookup(key)
            if block is None:
                break
            blocks.append(block)
        num_free = sum(self.pool.refs(block) == 0 for block in blocks)
        return Match(tuple(blocks), len(blocks) * self.block_size, num_free)

    def can_allocate(self, num_tokens: int, match: Match, headroom: int = 0) -> bool:
        """Whether ``num_tokens`` tokens fit, ``match`` reused, ``headroom`` blocks to spare."""
        fresh = blocks_for(num_tokens, self.block_size) - len(match.blocks)
        return fresh + match.num_free + headroom <= self.num_free

    def allocate(
        self,
        number: int,
        token_ids: Sequence[int],
        num_tokens: int,
        limit: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> tuple[list[int], int]:
        """A new table of blocks for ``num_tokens`` tokens and how many tokens they hold already.

        At most ``limit`` tokens count as cached. The caller has asked ``can_allocate``.
        """
        assert number not in self._tables, f"request {number} has a table"
        known = self.keys(token_ids) if keys is None else list(keys)
        match = self.match_prefix(token_ids, limit, known)
        assert self.can_allocate(num_tokens, match), f"no room for {num_tokens} tokens"
        for block in match.blocks:
            self.pool.touch(block)
        self._tables[number] = _Table(list(match.blocks), len(match.blocks), known)
        self._grow(self._tables[number], num_tokens)
        if self.caching:
            self.stats.queries += len(token_ids)
            self.stats.hits += match.num_tokens
        return self.table(number), match.num_tokens

    def ensure(self, number: int, num_tokens: int) -> list[int] | None:
        """Lengthens a table to hold ``num_tokens`` tokens: the new blocks, or None (and nothing
        changed) where the pool has too few free ones.
        """
        table = self._tables[number]
        missing = blocks_for(num_tokens, self.block_size) - len(table.blocks)
        if missing > self.num_free:
            return None
        return self._grow(table, num_tokens)

    def confirm(
        self,
        number: int,
        token_ids: Sequence[int],
        num_computed: int,
        salt: str | None = None,
    ) -> None:
        """Makes full blocks among the first ``num_computed`` tokens findable.

        ``token_ids`` are the request's tokens from position 0 on; all of the first
        ``num_computed`` are final and their keys and values are in the blocks.
        """
        if not self.caching:
            return
        table = self._tables[number]
        full = num_computed // self.block_size
        assert full <= len(table.blocks), f"request {number} has no block for {num_computed} tokens"
        extend_keys(table.keys, token_ids, self.block_size, full, salt)
        for i in range(table.num_confirmed, full):
            self.pool.set_key(table.blocks[i], table.keys[i])
        table.num_confirmed = max(table.num_confirmed, full)

    def free(self, number: int) -> None:
        """Drops a table, last block first, so that a prefix outlives what follows it."""
        for block in reversed(self._tables.pop(number).blocks):
            self.pool.free(block)

    def withhold(self, number: int) -> int:
        """Keeps a table's blocks taken although its request may have a new table, or end: the
        number to ``free`` them by, which is no request's."""
        self._num_withheld += 1
        self._tables[-self._num_withheld] = self._tables.pop(number)
        return -self._num_withheld

    def table(self, number: int, start: int = 0) -> list[int]:
        """A copy of a request's blocks from the ``start``-th on."""
        return self._tables[number].blocks[start:]

    def holds(self, number: int) -> bool:
        return number in self._tables

    def num_held(self, number: int) -> int:
        """Blocks in a request's table."""
        return len(self._tables[number].blocks)

    def numbers(self) -> set[int]:
        """Requests with a table, and numbers that ``withhold`` gave."""
        return set(self._tables)

    def check_integrity(self) -> None:
        """Asserts that tables and reference counts agree. For tests."""
        self.pool.check_integrity()
        counts = [0] * self.num_blocks
        for number, table in self._tables.items():
            assert len(set(table.blocks)) == len(table.blocks), f"request {number}: block twice"
            assert table.num_confirmed <= len(table.blocks)
            for block in table.blocks:
                counts[block] += 1
        for block, count in enumerate(counts):
            assert self.pool.refs(block) == count, f"block {block}: {count} tables name it"

    def _grow(self, table: _Table, num_tokens: int) -> list[int]:
        new: list[int] = []
        for _ in range(blocks_for(num_tokens, self.block_size) - len(table.blocks)):
            block = self.pool.allocate()
            assert block is not None, "the pool ran out after the check"
            new.append(block)
        table.blocks += new
        return new
