"""A pool of block ids: reference counts, an LRU free list, and which block holds which prefix.

It knows neither tokens nor memory. A block is *used* (reference count > 0) or *free*; a free
block that still has a key is *cached*: it can be revived by its key until it is handed out anew.
Every operation is O(1).
"""

from __future__ import annotations

_OUT = -1
"""In ``_next`` and ``_prev``: not on the free list."""


class BlockPool:
    """Ids 0 to ``num_blocks - 1``; at least one block.

    The free list is a ring through two arrays with a sentinel at index ``num_blocks``. Its head
    is handed out next: blocks without a key first, then cached ones, least recently freed first.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1, num_blocks
        self.num_blocks = num_blocks
        self.num_free = 0
        """Free blocks, the cached ones included."""
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._next = [_OUT] * num_blocks + [num_blocks]
        self._prev = [_OUT] * num_blocks + [num_blocks]
        for block in range(num_blocks):
            self._link(block, before=num_blocks)

    def allocate(self) -> int | None:
        """A free block with reference count 1, its key forgotten; None where none is free."""
        block = self._next[self.num_blocks]
        if block == self.num_blocks:
            return None
        self._unlink(block)
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None
        self._refs[block] = 1
        return block

    def touch(self, block: int) -> None:
        """One more reference to a used or cached block."""
        if self._refs[block] == 0:
            assert self._keys[block] is not None, f"block {block} is free and holds nothing"
            self._unlink(block)
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """One reference less; the last one puts the block on the free list."""
        assert self._refs[block] > 0, f"block {block} is free already"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            cached = self._keys[block] is not None
            self._link(block, before=self.num_blocks if cached else self._next[self.num_blocks])

    def refs(self, block: int) -> int:
        return self._refs[block]

    def lookup(self, key: bytes) -> int | None:
        """The block that holds ``key``, used or cached."""
        return self._by_key.get(key)

    def set_key(self, block: int, key: bytes) -> bool:
        """Makes a used block findable; False where another block holds ``key`` already."""
        assert self._refs[block] > 0, f"block {block} is free"
        assert self._keys[block] is None, f"block {block} has a key already"
        if key in self._by_key:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        return True

    def check_integrity(self) -> None:
        """Asserts that list, counts and keys agree. O(num_blocks), for tests."""
        listed, at = [], self._next[self.num_blocks]
        while at != self.num_blocks:
            assert self._prev[self._next[at]] == at, f"free list is torn at {at}"
            listed.append(at)
            assert len(listed) <= self.num_blocks, "free list has a loop"
            at = self._next[at]
        free = {block for block in range(self.num_blocks) if self._refs[block] == 0}
        assert len(listed) == len(set(listed)) == self.num_free, "free count is wrong"
        assert set(listed) == free, "free list and reference counts differ"
        assert all(count >= 0 for count in self._refs), "negative reference count"
        keys = {key: block for block, key in enumerate(self._keys) if key is not None}
        assert keys == self._by_key, "keys and index differ"

    def _link(self, block: int, before: int) -> None:
        after = self._prev[before]
        self._next[after] = self._prev[before] = block
        self._prev[block], self._next[block] = after, before
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._next[block], self._prev[block]
        self._next[after], self._prev[before] = before, after
        self._next[block] = self._prev[block] = _OUT
        self.num_free -= 1
