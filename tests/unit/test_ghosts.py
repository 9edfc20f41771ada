"""The ghost list estimates the additional hits of a larger cache."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.cache_groups import HOST_GROUPS, CacheGroup, Layout
from kvroute.blocks.chain import Scope
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import TokenIds
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsLost,
    KVEvent,
)
from kvroute.replica.engine_metrics import ghost_hit_tokens
from kvroute.replica.ghosts import SIZES, Ghosts, make_ghosts
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine

SIZE = 4  # number of tokens in a block
CAPACITY = 16  # number of blocks of the cache

PROMPTS = st.lists(  # prompts of chats with one of two beginnings
    st.tuples(st.integers(0, 1), st.integers(0, 6), st.integers(1, 6)), min_size=20, max_size=60
)


def prompt(system: int, chat: int, blocks: int) -> TokenIds:
    """Return two blocks that chats share, then blocks of this chat only, then a token."""
    shared = [1_000 + system] * 2 * SIZE
    own = [10 * system + chat] * blocks * SIZE
    return np.array([*shared, *own, 9], dtype=np.uint32)


def hits(pool: BlockPool, prompts: Sequence[TokenIds], *, ghosts: Ghosts | None = None) -> int:
    """Run the prompts one after the other, and return the number of hit blocks."""
    hit_blocks = 0
    for token_ids in prompts:
        table = pool.table(token_ids, Scope())
        hit_blocks += pool.admit(table) or 0
        assert pool.extend(table, len(token_ids))
        pool.free(table)
        events = pool.drain()
        if ghosts is not None:
            ghosts.record_events(events)
    return hit_blocks


def pool_of(blocks: float) -> BlockPool:
    return BlockPool(model="m", block_size=SIZE, capacity_blocks=int(blocks))


@given(PROMPTS)
def test_the_estimate_is_exact_for_prompts_that_do_not_overlap(
    drawn: list[tuple[int, int, int]],
) -> None:
    prompts = [prompt(*arguments) for arguments in drawn]
    ghosts = Ghosts(CAPACITY, SIZE)
    cached = hits(pool_of(CAPACITY), prompts, ghosts=ghosts)
    for name, size in SIZES.items():
        larger = hits(pool_of(size * CAPACITY), prompts)
        assert ghosts.hit_tokens[name] == SIZE * (larger - cached)
    assert len(ghosts) <= CAPACITY


BLOCKS = st.lists(st.integers(0, 60), min_size=1, max_size=20)
EVENTS = st.one_of(
    st.builds(BlockStored, BLOCKS, st.just(())),
    st.builds(BlockRemoved, BLOCKS),
    st.just(AllBlocksCleared()),
)


@given(st.lists(EVENTS))
def test_a_larger_cache_never_has_fewer_hits_and_the_list_never_exceeds_the_cache(
    events: list[KVEvent],
) -> None:
    ghosts = Ghosts(8, SIZE)
    for event in [*events, BlockStored([-1], ())]:
        before = ghosts.hit_tokens
        ghosts.record_events([event])
        after = ghosts.hit_tokens
        assert list(after.values()) == sorted(after.values())
        assert all(after[size] >= before[size] for size in SIZES)
    assert len(ghosts) <= 8


def test_the_list_is_bounded_if_blocks_are_only_evicted() -> None:
    for size in (1, 1_000):
        ghosts = Ghosts(8, SIZE)
        for first in range(0, 1_000, size):
            ghosts.record_events([removed(*range(first, first + size))])
        assert len(ghosts) <= 3 * 8


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_block_is_a_ghost_once_and_only_if_no_copy_is_left(
    steps: list[tuple[bool, int]],
) -> None:
    ghosts, cached = Ghosts(64, SIZE), Counter[int]()
    evicted = set[int]()
    for is_stored, block in steps:
        if is_stored:
            ghosts.record_events([stored(block)])
            cached[block] += 1
            evicted.discard(block)
        elif cached[block]:
            ghosts.record_events([removed(block)])
            cached[block] -= 1
            evicted |= set() if cached[block] else {block}
        assert sorted(block for part in ghosts._parts for block in part) == sorted(evicted)
        assert ghosts._copies == +cached


def test_a_ghost_that_is_evicted_again_is_the_youngest_and_in_the_list_once() -> None:
    ghosts = Ghosts(8, SIZE)
    ghosts.record_events([removed(*range(6)), stored(100), removed(0)])
    assert [[*part] for part in ghosts._parts] == [[4, 5, 0], [2, 3], [1]]


def removed(*blocks: int, group: int = 0) -> BlockRemoved:
    return BlockRemoved(blocks, group)


def stored(*blocks: int, group: int = 0) -> BlockStored:
    return BlockStored(blocks, (), group)


def test_the_evictions_after_a_blocks_own_eviction_give_the_needed_size() -> None:
    ghosts = Ghosts(8, SIZE)  # room for 2, 2 and 4 ghosts
    ghosts.record_events([removed(*range(9)), stored(100)])
    for block, expected in ((0, (0, 0, 0)), (1, (0, 0, 1)), (5, (0, 1, 2)), (8, (1, 2, 3))):
        ghosts.record_events([stored(block)])
        assert tuple(ghosts.hit_tokens.values()) == tuple(SIZE * blocks for blocks in expected)


def test_blocks_after_a_miss_are_no_hits_of_a_smaller_cache() -> None:
    ghosts = Ghosts(8, SIZE)
    ghosts.record_events([removed(*range(4)), stored(3, 100, 2)])
    assert ghosts.hit_tokens == dict.fromkeys(SIZES, SIZE)


def test_a_cleared_cache_and_lost_events_leave_no_ghosts() -> None:
    for event in (AllBlocksCleared(), EventsLost()):
        ghosts = Ghosts(8, SIZE)
        ghosts.record_events([removed(1), event, BlockStored([1], [Fingerprint(1)])])
        assert ghosts.hit_tokens == dict.fromkeys(SIZES, 0)


def test_only_the_first_group_of_the_layouts_first_entry_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = SimulatedEngine(SimulatedConfig(capacity_blocks=64, block_size=16))
    layout = Layout((CacheGroup("full_attention", 32), CacheGroup("mamba", 64)), 64)
    engine.facts = msgspec.structs.replace(engine.facts, layout=layout)
    monkeypatch.setattr(engine, "group_entries", (1, 0))
    ghosts = make_ghosts(engine, BlockTable(engine.group_entries))
    ghosts.record_events(
        [removed(1), removed(2, group=1), BlockStored([1], [Fingerprint(1)]), stored(2, group=1)]
    )
    assert ghosts.hit_tokens == dict.fromkeys(SIZES, 32)
    assert sum(ghosts._limits) == 64 * 16 // 32
    monkeypatch.setattr(engine, "group_entries", (None,))
    without = make_ghosts(engine, BlockTable(engine.group_entries))
    without.record_events([removed(1), BlockStored([1], [Fingerprint(1)])])
    assert without.hit_tokens == dict.fromkeys(SIZES, 0)


def test_metrics_add_up_the_ghost_hits_of_all_ranks() -> None:
    ranks = [Ghosts(8, SIZE), Ghosts(8, 2 * SIZE)]
    for ghosts in ranks:
        ghosts.record_events([removed(1), BlockStored([1], [Fingerprint(1)])])
    assert ghost_hit_tokens(ranks) == dict.fromkeys(SIZES, 3 * SIZE)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_simulated_engine_has_a_ghost_for_each_of_its_blocks(prefix_caching: bool) -> None:
    config = SimulatedConfig(capacity_blocks=64, prefix_caching=prefix_caching)
    assert sum(make_ghosts(SimulatedEngine(config), BlockTable())._limits) == 64


def test_blocks_that_are_reloaded_from_host_memory_are_not_missed() -> None:
    table = BlockTable((0, HOST_GROUPS))
    ghosts = Ghosts(4, 10, 0, table.in_host)
    before: list[KVEvent] = [
        BlockStored([1], [Fingerprint(1)]),
        BlockStored([1], [Fingerprint(1)], group=1),
        BlockRemoved([1]),
    ]
    ghosts.record_events(before)
    table.apply(before, Changes())
    ghosts.record_events([BlockStored([1], [Fingerprint(1)])])
    assert ghosts.hit_tokens["2"] == 0
    table.apply([BlockRemoved([1], group=1)], Changes())
    ghosts.record_events([BlockRemoved([1]), BlockStored([1], [Fingerprint(1)])])
    assert ghosts.hit_tokens["2"] == 10
