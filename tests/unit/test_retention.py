"""The order in which idle blocks are evicted."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.engine.retention import NO_SESSION, SHARED, IdleBlocks

BLOCKS = 24
ENDED, UNLIKELY, USUAL = Order
keeps = st.builds(RetentionHint, st.sampled_from(Order), st.integers(0, 4))


def idle_of(*blocks: int, hint: RetentionHint | None = None, idle: IdleBlocks) -> None:
    """End a request with these blocks, in the prompt's order."""
    idle.label(blocks, hint or RetentionHint())
    idle.put(blocks[::-1])


class AnyUse(RuleBasedStateMachine):
    """Requests hold blocks, set their retention and free them. The cache evicts some."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = IdleBlocks(BLOCKS)
        self.held: set[int] = set()
        self.put: list[int] = []  # idle blocks, the least recently used first
        self.blank = set(range(BLOCKS))

    @rule(count=st.integers(1, 6))
    def fill(self, count: int) -> None:
        filled = sorted(self.blank)[:count]
        self.blank -= set(filled)
        self.held |= set(filled)

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.put)))
        self.idle.take(block)
        self.put.remove(block)
        self.held.add(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), hint=st.none() | keeps)
    def finish(self, data: st.DataObject, hint: RetentionHint | None) -> None:
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        if hint:
            self.idle.label(blocks, hint)
        self.idle.put(blocks[::-1])
        self.held -= set(blocks)
        self.put += blocks[::-1]

    @rule(session=st.integers(1, 4))
    def end(self, session: int) -> None:
        self.idle.end(session)
        own = self.idle._owned.get(session, {})
        assert {self.idle._order_of[block] for block in own} <= {ENDED}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.idle.forget([block])
        self.held.remove(block)
        self.blank.add(block)

    @precondition(lambda self: self.put)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.put)))
        protected = set(
            data.draw(st.lists(st.sampled_from(self.put), max_size=len(self.put) - count))
        )
        expected = [block for block in self.idle if block not in protected][:count]
        assert self.idle.pop(count, protected) == expected
        self.put = [block for block in self.put if block not in expected]
        self.blank |= set(expected)

    @invariant()
    def idle_blocks_go_in_their_order(self) -> None:
        order = [*self.idle]
        assert len(order) == len(self.idle)
        assert sorted(order) == sorted(self.put)
        of_blocks = [self.idle._order_of[block] for block in order]
        assert of_blocks == sorted(of_blocks)
        for kind in (UNLIKELY, USUAL):
            same = [block for block in self.put if self.idle._order_of[block] == kind]
            assert [block for block in order if self.idle._order_of[block] == kind] == same

    @invariant()
    def a_session_has_exactly_its_own_blocks(self) -> None:
        owned = [(s, block) for s, blocks in self.idle._owned.items() for block in blocks]
        of_blocks = enumerate(self.idle._session_of)
        named = [(s, block) for block, s in of_blocks if s not in (NO_SESSION, SHARED)]
        assert sorted(owned) == sorted(named)
        assert all(self.idle._owned.values())

    def teardown(self) -> None:
        self.idle.forget(self.held)
        self.idle.pop(len(self.idle))
        assert not self.idle._owned
        assert set(self.idle._session_of) == {NO_SESSION}
        assert set(self.idle._order_of) == {USUAL}


AnyUse.TestCase.settings = settings(stateful_step_count=30)
TestAnyUse = AnyUse.TestCase


@given(
    st.lists(st.tuples(st.sampled_from(["end", "hit", "evict"]), st.integers(0, 99)), max_size=200),
    st.sampled_from([None, RetentionHint(), RetentionHint(session=7), RetentionHint(UNLIKELY)]),
)
def test_without_hints_the_order_is_lru(
    steps: list[tuple[str, int]], hint: RetentionHint | None
) -> None:
    idle, lru = IdleBlocks(BLOCKS), OrderedDict[int, None]()
    for action, number in steps:
        match action:
            case "end":
                block = number % BLOCKS
                if block not in lru:
                    if hint:
                        idle.label([block], hint)
                    idle.put([block])
                    lru[block] = None
            case "hit" if lru:
                block = [*lru][number % len(lru)]
                idle.take(block)
                idle.put([block])
                lru.move_to_end(block)
            case "evict" if lru:
                count = 1 + number % min(5, len(lru))
                oldest = [lru.popitem(last=False)[0] for _ in range(count)]
                assert idle.pop(count) == oldest
    assert [*idle] == [*lru]


@pytest.mark.parametrize("count", [1, 3])
def test_evicting_more_blocks_than_are_idle_raises(count: int) -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(*range(count - 1), idle=idle)
    with pytest.raises(
        ValueError, match=f"cannot evict {count} blocks: {count - 1} blocks are idle"
    ):
        idle.pop(count)
    assert len(idle) == count - 1


def test_blocks_of_ended_sessions_are_evicted_first_then_unlikely_ones_then_the_rest() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, hint=RetentionHint(session=6), idle=idle)
    idle_of(3, 4, hint=RetentionHint(UNLIKELY, session=7), idle=idle)
    idle_of(5, 6, hint=RetentionHint(ENDED, session=8), idle=idle)
    assert idle.pop(5) == [6, 5, 4, 3, 2]


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, 3, hint=RetentionHint(session=7), idle=idle)
    assert [*idle] == [3, 2, 1]
    idle.end(7)
    assert idle.pop(3) == [3, 2, 1]


def test_an_ended_sessions_own_blocks_are_evicted_first_and_shared_blocks_are_not() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, hint=RetentionHint(session=7), idle=idle)
    idle.take(1)
    idle_of(1, 3, hint=RetentionHint(session=8), idle=idle)
    idle.end(8)
    assert idle.pop(3) == [3, 2, 1]


def test_a_session_ends_with_its_last_request() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, hint=RetentionHint(session=7), idle=idle)
    idle_of(2, hint=RetentionHint(session=8), idle=idle)
    idle_of(3, hint=RetentionHint(ENDED, session=8), idle=idle)
    assert idle.pop(1) == [3]
    idle.end(8)
    assert idle.pop(1) == [2]


def test_a_session_that_continues_after_its_end_is_retained_again() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, hint=RetentionHint(session=7), idle=idle)
    idle_of(2, idle=idle)
    idle.end(7)
    idle.take(1)
    idle_of(1, hint=RetentionHint(session=7), idle=idle)
    assert idle.pop(2) == [2, 1]


def test_ended_sessions_are_evicted_in_the_order_of_their_first_ends() -> None:
    idle = IdleBlocks(BLOCKS)
    for session in (1, 2, 3):
        idle_of(2 * session, 2 * session + 1, hint=RetentionHint(session=session), idle=idle)
    for session in (3, 1, 2, 3, 1):
        idle.end(session)
    assert idle.pop(6) == [7, 6, 3, 2, 5, 4]


def test_a_block_first_used_without_a_session_belongs_to_no_session() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, idle=idle)
    idle.take(1)
    idle_of(1, 3, hint=RetentionHint(UNLIKELY, session=8), idle=idle)
    idle.end(8)
    assert idle.pop(3) == [3, 2, 1]


@pytest.mark.parametrize(
    ("hints", "expected"),
    [
        ((UNLIKELY, USUAL), USUAL),
        ((USUAL, UNLIKELY), USUAL),
        ((UNLIKELY, UNLIKELY), UNLIKELY),
        ((UNLIKELY, ENDED), UNLIKELY),
        ((ENDED, UNLIKELY), UNLIKELY),
        ((ENDED, ENDED), USUAL),  # both sessions have ended, but others may use the block
    ],
)
def test_a_shared_block_gets_the_hint_that_retains_it_longest(
    hints: tuple[Order, Order], expected: Order
) -> None:
    idle = IdleBlocks(BLOCKS)
    for session, order in enumerate(hints, 1):
        idle.label([1], RetentionHint(order, session=session))
    assert idle._order_of[1] == expected
