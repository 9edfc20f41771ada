"""The table has exactly the fingerprints of the blocks that the engine holds."""

from collections import Counter
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvroute.blocks.cache_groups import HOST_GROUPS, group_fingerprint
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.comparison import Comparison
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    EventsLost,
    KVEvent,
)

PLAIN = (0,)
WINDOWS = (1, 1, 0)  # two groups of sliding windows, then a group of full attention
PARTS = (0, None, 1)


def stored(*numbers: int, group: int = 0) -> BlockStored:
    """Return an event with these blocks; hash and fingerprint depend on a block's number."""
    return BlockStored(numbers, [print_of(number) for number in numbers], group)


def removed(*numbers: int, group: int = 0) -> BlockRemoved:
    return BlockRemoved(numbers, group)


def print_of(number: BlockHash, entry: int = 0) -> Fingerprint:
    assert isinstance(number, int)
    return group_fingerprint(Fingerprint(1_000 + number), entry)


def prints(*numbers: int, entry: int = 0) -> set[Fingerprint]:
    return {print_of(number, entry) for number in numbers}


def applied(blocks: BlockTable, *events: KVEvent) -> Changes:
    changes = Changes()
    blocks.apply(events, changes)
    return changes


def test_stored_blocks_have_the_fingerprints_in_the_engines_events() -> None:
    blocks = BlockTable()
    changes = applied(blocks, stored(10, 11), stored(12))
    assert changes.added == prints(10, 11, 12) == set(blocks.held())
    assert len(blocks) == 3


def test_a_second_copy_of_a_block_is_no_change_until_the_last_copy_is_removed() -> None:
    blocks = BlockTable()
    applied(blocks, stored(10))
    assert not applied(blocks, stored(10), removed(10))
    assert applied(blocks, removed(10)).removed == prints(10)


def test_a_block_that_is_stored_and_evicted_in_one_batch_is_not_published() -> None:
    blocks = BlockTable()
    assert applied(blocks, stored(10), removed(10)).added == set()
    assert blocks.held() == []


def test_a_clear_removes_earlier_blocks_and_not_later_ones() -> None:
    blocks = BlockTable(WINDOWS)
    before = [stored(10, group=group) for group in range(3)]
    changes = applied(blocks, *before, AllBlocksCleared(), stored(11, group=2))
    assert changes.cleared
    assert changes.added == prints(11) == set(blocks.held())


def test_after_lost_events_the_engines_list_decides_which_blocks_stay() -> None:
    blocks = BlockTable()
    applied(blocks, stored(10, 11, 12), EventsLost(), removed(99))
    changes = applied(blocks, BlocksHeld([{10: 2, 11: 1, 20: 1}]))
    assert changes.removed == prints(12)
    assert set(blocks.held()) == prints(10, 11)
    assert not applied(blocks, removed(10))  # a second copy remains
    assert applied(blocks, removed(10))


def test_the_engines_list_is_compared_with_the_table_before_it() -> None:
    blocks = BlockTable()
    blocks.apply([stored(10, 11), BlocksHeld([{10: 1, 20: 1}]), removed(10)], Changes())
    assert blocks.compared == Comparison(blocks=2, missing=1, surplus=1)
    assert (blocks.compared.true_blocks, blocks.compared.drift) == (2, 2)


def test_groups_are_compared_one_by_one_and_a_group_left_out_has_no_blocks() -> None:
    blocks = BlockTable(PARTS)
    events = [stored(10, 11), stored(10, group=1), stored(10, group=2)]
    blocks.apply([*events, BlocksHeld([{10: 1, 11: 1}, {12: 1}])], Changes())
    assert blocks.compared == Comparison(blocks=3, missing=0, surplus=1)
    assert set(blocks.held()) == prints(10, 11)


def test_blocks_in_host_memory_are_also_compared_separately() -> None:
    blocks = BlockTable((0, HOST_GROUPS))
    events = [stored(10, 11), stored(10, 11, group=1)]
    blocks.apply([*events, BlocksHeld([{10: 1, 11: 1}, {10: 1, 12: 1}])], Changes())
    assert blocks.compared == Comparison(blocks=4, missing=1, surplus=1)
    assert blocks.compared_in_host == Comparison(blocks=2, missing=1, surplus=1)
    alone = BlockTable()
    alone.apply([stored(10), BlocksHeld([{10: 1}])], Changes())
    assert alone.compared_in_host is None


def test_a_block_counts_while_all_groups_of_its_kind_hold_it() -> None:
    blocks = BlockTable(WINDOWS)
    assert not applied(blocks, stored(10, group=0))
    assert applied(blocks, stored(10, group=1)).added == prints(10, entry=1)
    assert applied(blocks, stored(10, group=2)).added == prints(10)
    assert applied(blocks, removed(10, group=0)).removed == prints(10, entry=1)
    assert not applied(blocks, removed(10, group=1))
    assert set(blocks.held()) == prints(10)


def test_a_group_outside_the_layout_is_ignored() -> None:
    blocks = BlockTable(PARTS)
    assert not applied(blocks, stored(10, group=1), removed(10, group=1))
    assert not applied(blocks, BlocksHeld([{}, {10: 1}, {}]))


def truth(
    group_entries: Sequence[int | None], copies: Sequence[Counter[BlockHash]]
) -> set[Fingerprint]:
    """Return the fingerprints to publish, computed directly from the definition."""
    held = set[Fingerprint]()
    for entry in {number for number in group_entries if number is not None}:
        parts = [copies[group] for group, number in enumerate(group_entries) if number == entry]
        held |= {print_of(number, entry) for number in parts[0] if all(p[number] for p in parts)}
    return held


class AnyGroups(RuleBasedStateMachine):
    """Groups store and remove blocks in any order.

    A mirror that applies each batch's changes has the table's fingerprints.
    """

    @initialize(
        group_entries=st.sampled_from([PLAIN, WINDOWS, PARTS, (0, 0, 0), (2, 0, 1, None, 1)])
    )
    def begin(self, group_entries: tuple[int | None, ...]) -> None:
        self.group_entries = group_entries
        self.table = BlockTable(group_entries)
        self.copies: list[Counter[BlockHash]] = [Counter() for _ in group_entries]
        self.mirror = set[Fingerprint]()

    @rule(group=st.integers(0, 4), numbers=st.lists(st.integers(0, 5), max_size=4))
    def store(self, group: int, numbers: list[int]) -> None:
        group %= len(self.group_entries)
        self.copies[group].update(numbers)
        self.apply(stored(*numbers, group=group))

    @rule(group=st.integers(0, 4), numbers=st.sets(st.integers(0, 5)))
    def remove(self, group: int, numbers: set[int]) -> None:
        group %= len(self.group_entries)
        self.copies[group] -= Counter(numbers)
        self.apply(removed(*numbers, group=group))

    @rule(group=st.integers(0, 4), number=st.integers(0, 5), other=st.integers(0, 5))
    def replace(self, group: int, number: int, other: int) -> None:
        """Replace a block in one batch of events."""
        group %= len(self.group_entries)
        self.copies[group] -= Counter([number])
        self.copies[group].update([other])
        self.apply(removed(number, group=group), stored(other, group=group))

    @rule(group=st.integers(0, 4), numbers=st.sets(st.integers(0, 5)))
    def lose_removals(self, group: int, numbers: set[int]) -> None:
        group %= len(self.group_entries)
        self.copies[group] -= Counter(numbers)
        self.apply(EventsLost(), BlocksHeld([dict(copy) for copy in self.copies]))

    @rule()
    def compare(self) -> None:
        self.apply(BlocksHeld([dict(copy) for copy in self.copies]))
        parts = zip(self.copies, self.group_entries, strict=True)
        blocks = sum(len(copies) for copies, entry in parts if entry is not None)
        assert self.table.compared == Comparison(blocks)

    @rule()
    def clear(self) -> None:
        self.copies = [Counter() for _ in self.group_entries]
        self.apply(AllBlocksCleared())

    def apply(self, *events: KVEvent) -> None:
        changes = Changes()
        self.table.apply(events, changes)
        before = set() if changes.cleared else self.mirror
        self.mirror = before - changes.removed | changes.added

    @invariant()
    def the_mirror_is_right(self) -> None:
        if hasattr(self, "table"):
            held = self.table.held()
            assert self.mirror == set(held) == truth(self.group_entries, self.copies)
            assert len(held) == len(set(held)) == len(self.table)


TestAnyGroups = AnyGroups.TestCase
