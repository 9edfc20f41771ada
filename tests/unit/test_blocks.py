from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import fingerprints, root
from kvroute.contract.generation import TokenIds
from kvroute.replica.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvroute.replica.sim_engine.blocks import BlockPool, Table

SIZE = 4  # tokens in a block


def tokens(count: int, start: int = 0) -> TokenIds:
    return np.arange(start, start + count, dtype=np.uint32)


def pool_of(blocks: int) -> BlockPool:
    return BlockPool(model="m", block_size=SIZE, capacity_blocks=blocks)


def held(pool: BlockPool, token_ids: TokenIds, namespace: str = "") -> Table:
    """Return a table with all its tokens in blocks."""
    table = pool.table(token_ids, Scope(namespace=namespace))
    assert pool.admit(table) is not None
    assert pool.extend(table, len(token_ids))
    return table


def test_blocks_without_kv_are_never_a_hit() -> None:
    """A sequence is preempted in the step that should compute its last two blocks."""
    pool = pool_of(12)
    table = held(pool, tokens(4 * SIZE))
    pool.forget(table, 2 * SIZE)
    pool.free(table)
    assert pool.admit(pool.table(tokens(4 * SIZE), Scope())) == 2
    stored, *removed = pool.drain()
    assert isinstance(stored, BlockStored)
    gone = [
        hash_
        for event in removed
        if isinstance(event, BlockRemoved)
        for hash_ in event.block_hashes
    ]
    assert sorted(gone) == sorted(stored.block_hashes[2:])


class AnyUse(RuleBasedStateMachine):
    """Sequences begin, grow and end in any order; few token values cause many shared prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(12)
        self.tables: list[Table] = []
        self.heard: Counter[object] = Counter()  # hash -> copies, from the events alone

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=20), namespace=st.just(""))
    def admit(self, token_ids: list[int], namespace: str) -> None:
        table = self.pool.table(np.array(token_ids, dtype=np.uint32), Scope(namespace=namespace))
        known = self.pool.copies()
        hits = self.pool.admit(table)
        if hits is None:
            assert not table.blocks
            return
        assert hits <= (len(token_ids) - 1) // SIZE
        assert all(hash_ in known for hash_ in table.hashes[:hits])
        assert self.pool.extend(table, len(token_ids))
        self.tables.append(table)

    @rule(which=st.integers(0, 9), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, which: int, more: list[int]) -> None:
        if which < len(self.tables):
            table = self.tables[which]
            before = list(table.blocks)
            table.token_ids += more
            if not self.pool.extend(table, len(table.token_ids)):
                assert table.blocks == before
                del table.token_ids[-len(more) :]

    @rule(which=st.integers(0, 9))
    def free(self, which: int) -> None:
        if which < len(self.tables):
            self.pool.free(self.tables.pop(which))

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() == (not self.tables)

    @invariant()
    def events_tell_what_is_cached(self) -> None:
        for event in self.pool.drain():
            match event:
                case BlockStored(block_hashes=hashes, fingerprints=fingerprints):
                    assert hashes == fingerprints
                    self.heard.update(hashes)
                case BlockRemoved(block_hashes=hashes):
                    self.heard.subtract(hashes)
                case AllBlocksCleared():
                    self.heard.clear()
        assert +self.heard == self.pool.copies()

    @invariant()
    def a_block_is_free_or_held_and_never_both(self) -> None:
        in_use = {block for table in self.tables for block in table.blocks}
        assert sorted([*in_use, *self.pool.cache.free]) == list(range(self.pool.capacity_blocks))


AnyUse.TestCase.settings = settings(stateful_step_count=30)
TestAnyUse = AnyUse.TestCase


@given(first=st.integers(1, 40), shared=st.integers(0, 40), more=st.integers(1, 20))
def test_hits_are_the_shared_full_blocks_and_never_the_last_token(
    first: int, shared: int, more: int
) -> None:
    pool = pool_of(64)
    shared = min(shared, first)
    pool.free(held(pool, tokens(first)))
    table = pool.table(np.concatenate([tokens(shared), tokens(more, start=1000)]), Scope())
    assert pool.admit(table) == shared // SIZE


def test_a_prompt_of_whole_blocks_caches_its_last_block_again() -> None:
    pool = pool_of(8)
    first, second = (held(pool, tokens(2 * SIZE)) for _ in range(2))
    assert first.blocks[0] == second.blocks[0]
    assert first.blocks[1] != second.blocks[1]
    assert list(pool.copies().values()) == [1, 2]


def test_each_copy_of_a_block_is_removed_by_an_event_of_its_own() -> None:
    pool = pool_of(3)
    pair = [held(pool, tokens(2 * SIZE)) for _ in range(2)]
    for table in pair:
        pool.free(table)
    pool.drain()
    held(pool, tokens(3 * SIZE, start=100))
    head, tail = pair[0].hashes
    removed = [event for event in pool.drain() if isinstance(event, BlockRemoved)]
    assert removed == [BlockRemoved([hash_]) for hash_ in (tail, tail, head)]


def test_the_longest_unused_leaf_is_reused_first() -> None:
    pool = pool_of(4)
    old, young = held(pool, tokens(2 * SIZE)), held(pool, tokens(2 * SIZE, start=100))
    pool.free(old)
    pool.free(young)
    held(pool, tokens(1, start=200))
    assert set(pool.copies()) == {old.hashes[0], *young.hashes}


def test_unfilled_blocks_are_reused_before_cached_ones() -> None:
    pool = pool_of(3)
    table = held(pool, tokens(2 * SIZE + 1))
    pool.free(table)
    held(pool, tokens(1, start=100))
    assert set(pool.copies()) == set(table.hashes)


def test_namespaces_share_nothing() -> None:
    pool = pool_of(8)
    table = held(pool, tokens(SIZE), "tenant")
    table.token_ids += range(SIZE)
    assert pool.extend(table, 2 * SIZE)
    assert pool.admit(pool.table(tokens(2 * SIZE), Scope())) == 0


def test_each_block_has_one_event_with_the_fingerprint_of_the_prompt_up_to_its_end() -> None:
    pool = BlockPool(model="m", revision="r", block_size=SIZE, capacity_blocks=8)
    table = pool.table(tokens(SIZE), Scope("adapter", "tenant"))
    pool.admit(table)
    for blocks in (1, 3):
        table.token_ids += range(len(table.token_ids), blocks * SIZE)
        assert pool.extend(table, blocks * SIZE)
    parent = root(model="m", revision="r", block_size=SIZE, variant="adapter", namespace="tenant")
    chain = fingerprints(tokens(3 * SIZE), block_size=SIZE, parent=parent)
    assert pool.drain() == [BlockStored(told, told) for told in (chain[:1], chain[1:])]


def test_a_sequence_that_does_not_fit_takes_nothing_not_even_its_hits() -> None:
    pool = pool_of(4)
    pool.free(held(pool, tokens(2 * SIZE)))
    held(pool, tokens(SIZE, start=100))
    table = pool.table(tokens(4 * SIZE), Scope())
    assert pool.admit(table) is None
    assert pool.used_blocks == 1


def test_without_prefix_caching_there_are_no_hits_and_no_events() -> None:
    pool = BlockPool(model="m", block_size=SIZE, capacity_blocks=4, prefix_caching=False)
    pool.free(held(pool, tokens(3 * SIZE)))
    assert pool.admit(pool.table(tokens(3 * SIZE), Scope())) == 0
    assert pool.drain() == []
