"""Block pool and manager against naive models, and the promises their docstrings make."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloverinfer.kvcache.manager import KVCacheManager
from cloverinfer.kvcache.pool import BlockPool
from cloverinfer.kvcache.prefix import block_key, root_key

BLOCKS, SIZE = 7, 2


class PoolMachine(RuleBasedStateMachine):
    """The model is two lists and a dict; every choice of the pool is predicted, not just legal."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.plain = list(range(BLOCKS))
        """Free blocks without a key, next one first."""
        self.cached: list[int] = []
        """Free blocks with a key, least recently freed first."""
        self.refs = dict.fromkeys(range(BLOCKS), 0)
        self.keys: dict[bytes, int] = {}

    def used(self) -> list[int]:
        return [block for block, count in self.refs.items() if count]

    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        if not self.plain and not self.cached:
            assert block is None
            return
        expected = self.plain.pop(0) if self.plain else self.cached.pop(0)
        assert block == expected
        self.refs[expected] = 1
        self.keys = {key: b for key, b in self.keys.items() if b != expected}

    @precondition(lambda self: self.used())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.used()))
        self.pool.free(block)
        self.refs[block] -= 1
        if self.refs[block] == 0 and block in self.keys.values():
            self.cached.append(block)
        elif self.refs[block] == 0:
            self.plain.insert(0, block)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys)))
        block = self.keys[key]
        assert self.pool.lookup(key) == block
        self.pool.touch(block)
        self.refs[block] += 1
        if block in self.cached:
            self.cached.remove(block)

    @precondition(lambda self: set(self.used()) - set(self.keys.values()))
    @rule(data=st.data(), name=st.integers(0, 9))
    def set_key(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from(sorted(set(self.used()) - set(self.keys.values()))))
        key = bytes([name])
        assert self.pool.set_key(block, key) == (key not in self.keys)
        self.keys.setdefault(key, block)

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_free == len(self.plain) + len(self.cached)
        assert [self.pool.refs(block) for block in range(BLOCKS)] == list(self.refs.values())
        assert all(self.pool.lookup(bytes([n])) == self.keys.get(bytes([n])) for n in range(10))


class ManagerMachine(RuleBasedStateMachine):
    """The model remembers which tokens every block holds, and who holds which block."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(BLOCKS, SIZE, enable_prefix_caching=True)
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        """All tokens up to the end of a block, where it was confirmed as full."""
        self.next = 0

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def allocate(self, tokens: list[int]) -> None:
        limit = len(tokens) - 1
        match = self.manager.match_prefix(tokens, limit)
        assert match.num_tokens == len(match.blocks) * SIZE <= limit
        if not self.manager.can_allocate(len(tokens), match):
            return
        number, self.next = self.next, self.next + 1
        blocks, cached = self.manager.allocate(number, tokens, len(tokens), limit)
        assert cached == match.num_tokens
        assert len(blocks) == -(-len(tokens) // SIZE)
        for i in range(cached // SIZE):
            assert self.content[blocks[i]] == tuple(tokens[: (i + 1) * SIZE]), "another prefix"
        for block in blocks[cached // SIZE :]:
            assert all(block not in table for table in self.tables.values()), "block in use"
            self.content.pop(block, None)
        self.tokens[number], self.tables[number] = list(tokens), blocks

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.tables)))
        want = len(self.tokens[number]) + 1
        missing = -(-want // SIZE) - len(self.tables[number])
        free = self.manager.num_free
        new = self.manager.ensure(number, want)
        if missing > free:
            assert new is None
            return
        assert new is not None
        assert len(new) == missing
        for block in new:
            assert all(block not in table for table in self.tables.values()), "block in use"
            self.content.pop(block, None)
        self.tokens[number].append(token)
        self.tables[number] += new

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def confirm(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tables)))
        tokens = self.tokens[number]
        count = data.draw(st.integers(0, len(tokens)))
        self.manager.confirm(number, tokens, count)
        for i in range(count // SIZE):
            self.content[self.tables[number][i]] = tuple(tokens[: (i + 1) * SIZE])
        assert self.manager.match_prefix(tokens, count).num_tokens == count // SIZE * SIZE

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.tables)))
        self.manager.free(number)
        del self.tokens[number], self.tables[number]

    @invariant()
    def agrees(self) -> None:
        self.manager.check_integrity()
        used = {block for table in self.tables.values() for block in table}
        assert self.manager.num_free == BLOCKS - len(used)
        for number, table in self.tables.items():
            assert self.manager.table(number) == table


TestPool = PoolMachine.TestCase
TestManager = ManagerMachine.TestCase
for case in (TestPool, TestManager):
    case.settings = settings(
        max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
    )


def test_the_last_token_is_never_cached() -> None:
    manager = KVCacheManager(8, 4, enable_prefix_caching=True)
    tokens = list(range(8))
    manager.allocate(0, tokens, 8)
    manager.confirm(0, tokens, 8)
    manager.free(0)
    assert manager.match_prefix(tokens).num_tokens == 8
    assert manager.match_prefix(tokens, limit=7).num_tokens == 4
    blocks, cached = manager.allocate(1, tokens, 8, limit=7)
    assert cached == 4
    assert len(set(blocks)) == 2
    assert (manager.stats.hits, manager.stats.queries) == (4, 16)


def test_reviving_takes_blocks_from_the_free_ones() -> None:
    manager = KVCacheManager(3, 2, enable_prefix_caching=True)
    manager.allocate(0, [1, 2, 3, 4], 4)
    manager.confirm(0, [1, 2, 3, 4], 4)
    manager.free(0)
    match = manager.match_prefix([1, 2, 3, 4, 5, 6, 7])
    assert (match.num_tokens, match.num_free) == (4, 2)
    assert not manager.can_allocate(7, match)
    assert manager.can_allocate(6, match)
    assert not manager.can_allocate(6, match, headroom=1)


def test_a_prefix_outlives_what_follows_it() -> None:
    manager = KVCacheManager(3, 2, enable_prefix_caching=True)
    tokens = [1, 2, 3, 4, 5, 6]
    manager.allocate(0, tokens, 6)
    manager.confirm(0, tokens, 6)
    manager.free(0)
    manager.allocate(1, [9], 1)
    assert manager.match_prefix(tokens).num_tokens == 4


def test_without_caching_nothing_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bytes:
        raise AssertionError("hashed")

    monkeypatch.setattr("cloverinfer.kvcache.prefix.block_key", refuse)
    manager = KVCacheManager(4, 2, enable_prefix_caching=False)
    manager.allocate(0, [1, 2, 3, 4], 4)
    manager.confirm(0, [1, 2, 3, 4], 4)
    manager.free(0)
    assert manager.match_prefix([1, 2, 3, 4]).num_tokens == 0


def test_keys_depend_on_the_whole_prefix() -> None:
    first = block_key(b"", [1, 2])
    assert block_key(first, [3, 4]) != block_key(b"", [3, 4])
    assert block_key(b"", [1, 2]) == first
    assert len({root_key(None), root_key(""), root_key("a"), root_key("b")}) == 4
    assert len(first) == 32


def test_a_block_cannot_be_freed_twice() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    assert block == 0
    pool.free(block)
    with pytest.raises(AssertionError, match="free already"):
        pool.free(block)
    assert pool.allocate() == 0
    assert pool.allocate() is None
