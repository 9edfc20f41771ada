"""The table holds exactly the fingerprints that the engine holds, whatever it stores and evicts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.audit_report import Comparison
from kvroute.contract.fingerprint import Fingerprint, fingerprints, root
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    EventsLost,
    KVEvent,
)

BLOCK = 2
ROOT = root(model="m", block_size=BLOCK)


def table() -> BlockTable:
    return BlockTable(model="m", revision="", block_size=BLOCK)


def expected(*tokens: int) -> list[Fingerprint]:
    return fingerprints(np.array(tokens, np.uint32), block_size=BLOCK, parent=ROOT)


def applied(blocks: BlockTable, *events: KVEvent) -> Changes:
    changes = Changes()
    blocks.apply(events, changes)
    return changes


def test_stored_blocks_have_the_fingerprints_of_their_prompt() -> None:
    blocks = table()
    changes = applied(
        blocks, BlockStored([10, 11], None, [1, 2, 3, 4]), BlockStored([12], 11, [5, 6])
    )
    assert changes.added == set(expected(1, 2, 3, 4, 5, 6))
    assert set(blocks.held()) == changes.added


def test_a_second_copy_of_a_block_is_no_change_until_the_last_copy_goes() -> None:
    blocks = table()
    applied(blocks, BlockStored([10], None, [1, 2]))
    assert not applied(blocks, BlockStored([10], None, [1, 2]), BlockRemoved([10]))
    assert applied(blocks, BlockRemoved([10])).removed == set(expected(1, 2))


def test_a_block_stored_and_evicted_in_one_batch_is_left_out_of_what_is_held() -> None:
    blocks = table()
    changes = applied(blocks, BlockStored([10], None, [1, 2]), BlockRemoved([10]))
    assert changes.added == set()
    assert blocks.held() == []


def test_a_clear_forgets_what_came_before_it_and_not_what_comes_after() -> None:
    blocks = table()
    changes = applied(
        blocks,
        BlockStored([10], None, [1, 2]),
        AllBlocksCleared(),
        BlockStored([11], None, [3, 4]),
    )
    assert changes.cleared
    assert changes.added == set(expected(3, 4)) == set(blocks.held())


def test_after_lost_events_what_the_engine_tells_decides_what_is_still_believed() -> None:
    blocks = table()
    applied(blocks, BlockStored([10, 11, 12], None, [1, 2, 3, 4, 5, 6]))
    applied(blocks, EventsLost(), BlockStored([21], 20, [7, 8]), BlockRemoved([99]))
    changes = applied(blocks, BlocksHeld({10: 2, 11: 1, 20: 1, 21: 1}))
    assert changes.removed == set(expected(1, 2, 3, 4, 5, 6)) - set(blocks.held())
    assert set(blocks.held()) == set(expected(1, 2, 3, 4))
    assert not applied(blocks, BlockRemoved([10]))  # there is a second one
    assert applied(blocks, BlockRemoved([10]))


def test_the_engines_word_is_compared_with_what_was_believed_until_then() -> None:
    blocks = table()
    told = BlockStored([10, 11], None, [1, 2, 3, 4])
    comparison = blocks.apply([told, BlocksHeld({10: 1, 20: 1}), BlockRemoved([10])], Changes())
    assert comparison == Comparison(blocks=2, missing=1, surplus=1)
    assert (comparison.true_blocks, comparison.drift) == (2, 2)
    assert blocks.apply([BlockRemoved([10])], Changes()) is None


def test_namespaces_and_adapters_share_no_fingerprint() -> None:
    blocks = table()
    applied(blocks, BlockStored([1], None, [1, 2]))
    applied(blocks, BlockStored([2], None, [1, 2], namespace="tenant"))
    applied(blocks, BlockStored([3], None, [1, 2], lora="adapter"))
    assert len(set(blocks.held())) == 3


chains = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=6), min_size=1, max_size=12)


@given(chains, st.data())
def test_changes_lead_from_any_state_to_the_next(prompts: list[list[int]], data: st.DataObject):  # type: ignore[no-untyped-def]
    """A mirror that takes each batch's changes holds what the table holds after every batch."""
    blocks, mirror, copies = table(), set[Fingerprint](), list[tuple[int, ...]]()
    for prompt in prompts:
        events: list[KVEvent] = []
        prefix: tuple[int, ...] = ()
        for i in range(0, len(prompt) - 1, BLOCK):
            parent = hash(prefix) if prefix else None
            prefix = (*prefix, *prompt[i : i + BLOCK])
            events.append(BlockStored([hash(prefix)], parent, prompt[i : i + BLOCK]))
            copies.append(prefix)
        evictions = data.draw(st.integers(0, len(copies)))
        copies.sort(key=len)  # leaves first, as engines evict
        for _ in range(evictions):
            events.append(BlockRemoved([hash(copies.pop())]))
        if data.draw(st.booleans()) and data.draw(st.booleans()):
            events.append(AllBlocksCleared())
            copies.clear()
        changes = applied(blocks, *events)
        mirror = (set() if changes.cleared else mirror) - changes.removed | changes.added
        truth = {fingerprint for held in copies for fingerprint in expected(*held)}
        assert mirror == set(blocks.held()) == truth
