"""The order in which idle blocks are evicted."""

import math
from collections import Counter, OrderedDict
from typing import NamedTuple
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from kvroute.contract.keep import KEEP, Keep
from kvroute.replica.engine.idle_queue import ENDED, LEARNED, STILL_S, IdleQueue, Kind, kind_of
from kvroute.replica.engine.kv_events import Evictions
from kvroute.replica.engine.retention import (
    NO_SESSION,
    PROMISED_SHARE,
    SHARED,
    SHARED_LOOK_S,
    IdleBlocks,
)

BLOCKS = 24
MINUTE_S = 60.0

keeps = st.builds(
    Keep,
    chance=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
    still_s=st.sampled_from([0.0, 0.0, 9.0, 60.0, 200.0]),
    session=st.integers(0, 4),
    tenant=st.integers(0, 3),
    is_promised=st.booleans(),
)


def idle_of(*blocks: int, at_s: float = 0.0, keep: Keep = KEEP, idle: IdleBlocks) -> None:
    """Let a request end that has these blocks, in the prompt's order."""
    idle.label(blocks, keep)
    idle.put(blocks[::-1], at_s)


class AnyUse(RuleBasedStateMachine):
    """Requests hold, label and free blocks; the cache evicts some."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = IdleBlocks(BLOCKS)
        self.now_s = 0.0
        self.held: set[int] = set()
        self.since_s: dict[int, float] = {}  # idle block -> time since which it is idle
        self.blank = set(range(BLOCKS))

    @initialize()
    def start(self) -> None:
        self.idle.clear()

    @rule(count=st.integers(1, 6))
    def fill(self, count: int) -> None:
        for block in sorted(self.blank)[:count]:
            self.blank.remove(block)
            self.held.add(block)

    @precondition(lambda self: self.since_s)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.since_s)))
        self.idle.take(block)
        del self.since_s[block]
        self.held.add(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.none() | keeps, waits_s=st.sampled_from([0.0, 0.01, 7.0, 70.0]))
    def finish(self, data: st.DataObject, keep: Keep | None, waits_s: float) -> None:
        self.now_s += waits_s
        blocks = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
        if keep:
            self.idle.label(blocks, keep)
        self.idle.put(blocks[::-1], self.now_s)
        self.held -= set(blocks)
        self.since_s |= dict.fromkeys(blocks, self.now_s)

    @precondition(lambda self: self.since_s)
    @rule(data=st.data(), keep=keeps, waits_s=st.sampled_from([0.0, 0.01, 70.0]))
    def label_again(self, data: st.DataObject, keep: Keep, waits_s: float) -> None:
        self.now_s += waits_s
        known = sorted({*self.since_s, *self.held})
        self.idle.label(data.draw(st.lists(st.sampled_from(known), unique=True)), keep)

    @rule(session=st.integers(1, 4))
    def end(self, session: int) -> None:
        self.idle.end(session)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.idle.forget([block])
        self.held.remove(block)
        self.blank.add(block)

    @precondition(lambda self: self.since_s)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.since_s)))
        ages = self.ages()
        gone = self.idle.pop(count, self.now_s)
        assert len(set(gone)) == count
        assert set(gone) <= self.since_s.keys()
        for block in gone:
            del self.since_s[block]
        self.blank |= set(gone)
        if ages and self.since_s:
            oldest_kept = max(ages[block] for block in self.since_s)
            assert min(ages[block] for block in gone) >= oldest_kept - 1e-6
        evictions = self.idle.evictions()
        assert evictions is not None
        assert count == sum(
            (evictions.ended, evictions.unlikely, evictions.usual, evictions.promised)
        )
        assert self.idle.evictions() is None

    def ages(self) -> dict[int, float]:
        """Return the ages of all idle blocks; none if promises may be ignored."""
        self.idle._looked_s = -math.inf
        self.idle._end_promises(self.now_s)
        if sum(len(queue.blocks) for queue in self.idle._promised) > self.idle._cap:
            return {}
        queues = self.idle._queue_of
        return {
            block: queues[block].age(queues[block].blocks[block], self.now_s, queues[block].still_s)
            for block in self.since_s
        }

    @invariant()
    def idle_blocks_are_those_that_were_put(self) -> None:
        assert sorted(self.idle) == sorted(self.since_s)
        assert sorted(self.idle.in_order(self.now_s)) == sorted(self.since_s)
        assert len(self.idle) == len(self.since_s)

    @invariant()
    def each_queue_begins_with_what_is_idle_the_longest(self) -> None:
        for queue in self.idle._queues.values():
            assert [*queue.blocks.values()] == sorted(queue.blocks.values())

    @invariant()
    def a_session_has_exactly_its_own_blocks(self) -> None:
        owned = [(s, block) for s, blocks in self.idle._owned.items() for block in blocks]
        of_blocks = enumerate(self.idle._session_of)
        told = [(s, block) for block, s in of_blocks if s not in (NO_SESSION, SHARED)]
        assert sorted(owned) == sorted(told)
        assert all(self.idle._owned.values())

    @invariant()
    def all_that_sessions_own_has_ended_with_them(self) -> None:
        idle = self.idle
        over = [block for session in idle._ended_sessions for block in idle._owned[session]]
        assert all(idle._queue_of[block] is idle._ended for block in over)

    @invariant()
    def promises_on_blocks_of_several_sessions_have_an_end(self) -> None:
        idle = self.idle
        promised = {
            block
            for block, session in enumerate(idle._session_of)
            if session == SHARED and idle._queue_of[block].still_s
        }
        assert idle._until_s.keys() | idle._just_promised.keys() == promised

    def teardown(self) -> None:
        self.idle.forget(self.held)
        self.idle.pop(len(self.idle), self.now_s)
        assert not self.idle._owned
        assert not self.idle._ended_sessions
        assert not self.idle._silent
        assert not any(queue.blocks for queue in self.idle._queues.values())
        assert set(self.idle._session_of) == {NO_SESSION}
        assert set(self.idle._queue_of) == {self.idle._usual}


AnyUse.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestAnyUse = AnyUse.TestCase


@given(
    st.lists(st.tuples(st.sampled_from(["end", "hit", "evict"]), st.integers(0, 99)), max_size=200),
    st.sampled_from([None, KEEP, Keep(session=7), Keep(session=7, tool_chance=0.1)]),
)
def test_without_hints_the_order_is_lru(steps: list[tuple[str, int]], keep: Keep | None) -> None:
    idle, lru = IdleBlocks(BLOCKS), OrderedDict[int, None]()
    for now_s, (what, number) in enumerate(steps):
        match what:
            case "end":
                block = number % BLOCKS
                if block not in lru:
                    if keep:
                        idle.label([block], keep)
                    idle.put([block], now_s)
                    lru[block] = None
            case "hit" if lru:
                block = [*lru][number % len(lru)]
                idle.take(block)
                idle.put([block], now_s)
                lru.move_to_end(block)
            case "evict" if lru:
                count = 1 + number % min(5, len(lru))
                gone = [lru.popitem(last=False)[0] for _ in range(count)]
                assert idle.pop(count, now_s) == gone
    assert [*idle.in_order(999.0)] == [*lru]


def test_half_the_chance_ages_twice_as_fast() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, at_s=0.0, keep=Keep(1.0), idle=idle)
    idle_of(2, at_s=6.0, keep=Keep(0.5), idle=idle)
    idle_of(3, at_s=9.0, keep=Keep(0.5), idle=idle)
    assert [*idle.in_order(14.0)] == [2, 1, 3]  # ages 16, 14 and 10
    assert idle.pop(3, 14.0) == [2, 1, 3]


@pytest.mark.parametrize(("chance", "unlikely"), [(0.6, 0), (0.5, 0), (0.4, 1), (0.01, 1)])
def test_unlikely_blocks_are_reused_less_than_half_as_often(chance: float, unlikely: int) -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(chance), idle=idle)
    idle.pop(1, 1.0)
    assert idle.evictions() == Evictions(unlikely=unlikely, usual=1 - unlikely)


@pytest.mark.parametrize("count", [1, 3])
def test_more_blocks_than_are_idle_are_refused(count: int) -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(*range(count - 1), idle=idle)
    with pytest.raises(ValueError, match=f"cannot evict {count} blocks: only {count - 1} are idle"):
        idle.pop(count, 1.0)
    assert len(idle) == count - 1


def test_the_end_of_a_prompt_is_evicted_before_its_beginning() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, 3, keep=Keep(session=7), idle=idle)
    assert [*idle.in_order(1.0)] == [3, 2, 1]
    idle.label([1, 2, 3], Keep(0.3, session=7))
    assert [*idle.in_order(1.0)] == [3, 2, 1]
    idle.end(7)
    assert idle.pop(3, 2.0) == [3, 2, 1]


def test_an_ended_sessions_own_blocks_are_evicted_first_and_shared_blocks_are_not() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, keep=Keep(session=7), idle=idle)
    idle.take(1)
    idle_of(1, 3, keep=Keep(session=8), at_s=9.0, idle=idle)
    idle.end(8)
    assert idle.pop(3, 10.0) == [3, 2, 1]
    assert idle.evictions() == Evictions(ended=1, usual=2)


def test_a_session_ends_with_its_last_request() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(session=7), idle=idle)
    idle_of(2, keep=Keep(session=8), at_s=5.0, idle=idle)
    idle_of(3, keep=Keep(0.0, session=8), at_s=6.0, idle=idle)
    assert idle.pop(1, 7.0) == [3]
    idle.end(8)
    assert idle.pop(1, 7.0) == [2]


def test_a_session_that_continues_after_its_end_is_retained_again() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(session=7), idle=idle)
    idle_of(2, at_s=1.0, idle=idle)
    idle.end(7)
    idle.take(1)
    idle_of(1, keep=Keep(session=7), at_s=2.0, idle=idle)
    assert idle.pop(2, 3.0) == [2, 1]


def test_a_promise_holds_until_its_time_is_over() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(still_s=MINUTE_S, session=7), idle=idle)
    idle_of(2, 3, at_s=50.0, idle=idle)
    assert idle.pop(1, 59.0) == [3]
    assert [*idle.in_order(100.0)] == [2, 1]  # ages 50 and 40
    assert idle.pop(1, 111.0) == [2]
    assert idle.pop(1, 112.0) == [1]
    assert idle.evictions() == Evictions(usual=3)


def test_a_broken_promise_is_counted() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(still_s=MINUTE_S, session=7), idle=idle)
    assert idle.pop(1, 59.0) == [1]
    assert idle.evictions() == Evictions(promised=1)


def test_the_retention_for_a_tool_call_counts_from_when_blocks_became_idle() -> None:
    idle = IdleBlocks(BLOCKS)
    said = Keep(0.3, session=7, tool_chance=1.0, tool_s=MINUTE_S)
    idle_of(1, 2, keep=said, idle=idle)
    idle_of(3, at_s=0.5, idle=idle)
    idle.label([1, 2], said.after_tool_call)
    assert idle.pop(1, 59.0) == [3]
    idle_of(4, at_s=59.0, idle=idle)
    assert idle.pop(1, 119.5) == [4]  # its age is 60.5; the others have 59.5


def test_promises_hold_a_share_of_the_cache_at_most() -> None:
    idle = IdleBlocks(BLOCKS)
    cap = int(BLOCKS * PROMISED_SHARE)
    promised = [*range(cap + 4)]
    idle_of(*promised, keep=Keep(still_s=MINUTE_S, session=7), idle=idle)
    others = [*range(cap + 4, BLOCKS)]
    idle_of(*others, at_s=1.0, idle=idle)
    assert idle.pop(len(others), 2.0) == [*promised[-4:][::-1], *others[4:][::-1]]
    assert idle.evictions() == Evictions(promised=4, usual=len(others) - 4)


def test_a_tenant_with_many_promises_breaks_no_promise_of_others() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, 3, keep=Keep(still_s=MINUTE_S, session=7, tenant=1), idle=idle)
    greedy = [*range(4, 20)]
    idle_of(*greedy, keep=Keep(still_s=MINUTE_S, session=8, tenant=2), at_s=1.0, idle=idle)
    idle_of(20, at_s=2.0, idle=idle)
    most = len(greedy) + 3 - int(BLOCKS * PROMISED_SHARE)
    assert idle.pop(most + 1, 3.0) == [*greedy[-most:][::-1], 20]
    assert {1, 2, 3} <= set(idle)


@given(keeps)
def test_promises_are_of_few_kinds_and_never_shorter_than_they_were_made(keep: Keep) -> None:
    kind = kind_of(keep)
    assert (kind == ENDED) == (keep.chance <= 0.0)
    if kind != ENDED:
        idle = IdleBlocks(BLOCKS)
        idle_of(1, keep=keep, idle=idle)
        idle_of(2, keep=KEEP, at_s=keep.still_s, idle=idle)
        if keep.still_s:
            assert idle.pop(1, keep.still_s) == [2]


def test_any_number_from_a_faulty_router_has_a_kind() -> None:
    for chance in (float("nan"), float("inf"), 1e-300, 5.0):
        for still_s in (float("nan"), float("inf"), -5.0):
            idle = IdleBlocks(BLOCKS)
            idle_of(1, keep=Keep(chance, still_s, -3, -7), idle=idle)
            assert idle.pop(1, 9.0) == [1]
            assert not idle._owned


def test_ended_sessions_are_evicted_in_the_order_of_their_ends() -> None:
    idle = IdleBlocks(BLOCKS)
    for session in (1, 2, 3):
        blocks = 2 * session, 2 * session + 1
        idle_of(*blocks, keep=Keep(session=session), at_s=1.0 * session, idle=idle)
    for session in (3, 1, 2):
        idle.end(session)
    assert idle.pop(6, 9.0) == [7, 6, 3, 2, 5, 4]


def test_a_second_end_has_no_effect_until_the_session_has_continued() -> None:
    idle = IdleBlocks(BLOCKS)
    for session in (1, 2):
        idle_of(session, 10 + session, keep=Keep(session=session), idle=idle)
        idle.end(session)
    idle._insert = Mock(wraps=idle._insert)  # type: ignore[method-assign]
    idle.end(1)
    assert not idle._insert.called
    idle_of(3, at_s=1.0, keep=Keep(session=1), idle=idle)
    idle.end(1)
    assert idle.pop(5, 2.0) == [12, 2, 3, 11, 1]


def test_an_end_moves_no_blocks_that_have_ended_before() -> None:
    ended = IdleQueue(ENDED)
    ended.insert([(1, 9.0)])
    first = ended.blocks
    ended.blocks = CountedPops(first)
    ended.insert([(2, 3.0), (3, 1.0)])
    assert [*ended.blocks.items()] == [(1, 9.0), (2, 9.0), (3, 9.0)]


class CountedPops(OrderedDict[int, float]):
    """A dict that can only grow."""

    def popitem(self, last: bool = True) -> tuple[int, float]:
        raise AssertionError("a block was moved")


@given(st.lists(st.floats(0, 9), max_size=20), st.lists(st.floats(0, 9), min_size=1, max_size=20))
def test_blocks_are_inserted_at_their_places(there: list[float], added: list[float]) -> None:
    queue = IdleQueue(kind_of(KEEP))
    queue.blocks.update(enumerate(sorted(there)))
    queue.insert([(100 + number, since_s) for number, since_s in enumerate(added)])
    assert [*queue.blocks.values()] == sorted(there + added)


def test_blocks_from_before_the_first_hint_belong_to_no_session() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=KEEP, idle=idle)
    idle.label([2], KEEP)  # other requests hold it, too
    idle_of(3, keep=KEEP, idle=idle)
    assert idle.pop(1, 0.5) == [1]
    idle_of(4, keep=KEEP, at_s=1.0, idle=idle)
    idle.take(4)
    idle_of(4, 2, 1, keep=Keep(session=7), at_s=2.0, idle=idle)  # block 1 has new content
    idle.end(7)
    assert idle.pop(4, 9.0) == [1, 3, 2, 4]
    assert idle.evictions() == Evictions(ended=1, usual=4)


def test_a_request_without_a_hint_has_the_highest_chance_and_no_session() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, keep=Keep(0.1, session=7), idle=idle)
    idle_of(2, keep=KEEP, idle=idle)
    idle.take(2)
    idle_of(2, 3, keep=Keep(0.1, session=8), at_s=1.0, idle=idle)
    idle.end(8)
    assert idle.pop(3, 9.0) == [3, 1, 2]
    assert idle.evictions() == Evictions(ended=1, unlikely=1, usual=1)


@given(st.sampled_from([1.0, 0.5, 0.1, 0.0]), st.sampled_from([0.0, 60.0]))
def test_an_end_does_not_change_blocks_that_others_use(chance: float, still_s: float) -> None:
    idle = IdleBlocks(BLOCKS)
    idle.label([1], Keep(chance, still_s, session=7))
    idle.label([1], Keep(chance, still_s, session=8))
    before = idle._queue_of[1].kind
    idle.label([1], Keep(0.0, session=9))
    assert idle._queue_of[1].kind == (before if chance else kind_of(KEEP))


@given(st.lists(st.floats(0.0, 40.0), max_size=20), st.booleans())
def test_a_promise_on_a_shared_block_expires_even_if_the_block_is_used(
    uses: list[float], is_named: bool
) -> None:
    idle, now_s = IdleBlocks(BLOCKS), 0.0
    idle.label([1], Keep(session=7))
    idle_of(1, keep=Keep(still_s=MINUTE_S, session=8 * is_named), idle=idle)
    for wait_s in [*uses, SHARED_LOOK_S]:
        idle.take(1)
        now_s += wait_s
        idle_of(1, at_s=now_s, keep=Keep(session=9), idle=idle)
        assert idle._queue_of[1].still_s or now_s >= MINUTE_S
    over_s = max(now_s, MINUTE_S) + 2 * SHARED_LOOK_S
    idle_of(2, at_s=over_s, idle=idle)
    assert idle.pop(1, over_s) == [1]
    assert not idle._until_s


def test_a_new_promise_on_a_shared_block_begins_anew_and_a_shorter_one_does_not() -> None:
    for still_s, until_s in ((MINUTE_S, 90.0), (9.0, 60.0)):
        idle = IdleBlocks(BLOCKS)
        idle.label([1], Keep(session=7))
        idle_of(1, keep=Keep(still_s=MINUTE_S, session=8), idle=idle)
        idle.take(1)
        idle_of(1, at_s=30.0, keep=Keep(still_s=still_s, session=9), idle=idle)
        assert idle._until_s == {1: until_s}


def test_a_tool_calls_learned_wait_is_no_promise() -> None:
    learned = Keep(0.3, session=7, tool_chance=0.3, tool_s=MINUTE_S).after_tool_call
    said = Keep(0.3, 9.0, 7, tool_chance=0.3, tool_s=MINUTE_S).after_tool_call
    for keep, evictions in ((learned, Evictions(unlikely=1)), (said, Evictions(promised=1))):
        idle = IdleBlocks(BLOCKS)
        idle_of(1, keep=keep, idle=idle)
        idle_of(2, at_s=9.0, idle=idle)
        assert idle.pop(1, 59.0) == [2]
        assert idle.evictions() == Evictions(usual=1)
        assert idle.pop(1, 59.5) == [1]
        assert idle.evictions() == evictions


def test_learned_waits_give_way_to_promises() -> None:
    idle, cap = IdleBlocks(BLOCKS), int(BLOCKS * PROMISED_SHARE)
    promised, waits = [*range(cap)], [*range(cap, cap + 4)]
    idle_of(*promised, keep=Keep(still_s=MINUTE_S, session=1), idle=idle)
    learned = Keep(still_s=MINUTE_S, session=2, is_promised=False)
    idle_of(*waits, keep=learned, at_s=1.0, idle=idle)
    idle_of(20, at_s=2.0, idle=idle)
    assert idle.pop(5, 9.0) == [*waits[::-1], 20]
    assert idle.evictions() == Evictions(usual=5)


def test_without_learned_waits_promises_of_tenants_over_their_share_are_ignored_at_once() -> None:
    idle, cap = IdleBlocks(BLOCKS), int(BLOCKS * PROMISED_SHARE)
    promised, wait = [*range(cap + 1)], cap + 1
    idle_of(*promised, keep=Keep(0.1, MINUTE_S, session=1), idle=idle)
    idle_of(wait, keep=Keep(0.1, MINUTE_S, session=2, is_promised=False), at_s=1.0, idle=idle)
    idle_of(wait + 1, keep=Keep(0.1, session=3), at_s=2.0, idle=idle)
    assert idle.pop(3, 9.0) == [wait, promised[-1], wait + 1]


class Plain(NamedTuple):
    """An idle block of the model."""

    block: int
    since_s: float
    kind: Kind

    def aged(self, now_s: float, *, is_ignored: bool) -> float:
        still_s = 0.0 if is_ignored else STILL_S[self.kind.still]
        age_s = now_s - self.since_s - still_s
        if self.kind == ENDED:
            return math.inf
        return age_s * 2.0 ** (self.kind.halvings / 2) if age_s > 0 else age_s


def next_of(idle: list[Plain], now_s: float) -> Plain:
    """Return the block to evict next, by applying the rules to each block."""
    promised = [each for each in idle if each.kind.still]
    plain = [each for each in idle if not each.kind.still]
    is_beyond, cap = len(promised) > BLOCKS * PROMISED_SHARE, BLOCKS * PROMISED_SHARE
    if is_beyond:
        held = Counter(each.kind.tenant for each in promised)
        greedy = {tenant for tenant, blocks in held.items() if blocks > cap / len(held)}
        ignored = {LEARNED} if LEARNED in held else greedy
        plain += [each for each in promised if each.kind.tenant in ignored]
    candidates = plain or promised
    return max(candidates, key=lambda each: each.aged(now_s, is_ignored=is_beyond))


def over(each: Plain, now_s: float) -> Plain:
    over_s = each.since_s + STILL_S[each.kind.still]
    is_over = each.kind.still and over_s <= now_s
    return Plain(each.block, over_s, Kind(each.kind.halvings)) if is_over else each


@given(
    st.lists(st.tuples(keeps, st.integers(1, 7), st.integers(0, 3)), min_size=4, max_size=24),
    st.booleans(),
)
def test_the_order_of_eviction_is_that_of_a_simple_model(
    steps: list[tuple[Keep, int, int]], one_by_one: bool
) -> None:
    idle, model, blank, now_s = IdleBlocks(BLOCKS), list[Plain](), [*range(BLOCKS)], 0.0
    for number, (keep, blocks, evicted) in enumerate(steps):
        now_s += 0.7123 + 0.0137 * number + 5 * evicted  # so all ages are different
        new, blank = blank[:blocks], blank[blocks:]
        keep = replace(keep, session=1 + number)  # so no block is shared
        idle_of(*new, keep=keep, at_s=now_s, idle=idle)
        model += [Plain(block, now_s, kind_of(keep)) for block in reversed(new)]
        now_s += 0.5
        model = [over(each, now_s) for each in model]
        expected: list[int] = []
        for _ in range(min(blocks * evicted, len(model))):
            gone = next_of(model, now_s)
            model.remove(gone)
            expected.append(gone.block)
        runs = [1] * len(expected) if one_by_one else [len(expected)]
        assert [block for count in runs for block in idle.pop(count, now_s)] == expected
        blank += expected


def test_the_order_of_queues_is_used_for_a_while() -> None:
    idle = IdleBlocks(100)
    for session in range(1, 40):
        keep = Keep(1 / session, 9.0, session, tenant=session)
        idle_of(2 * session, 2 * session + 1, keep=keep, idle=idle)
    idle_of(0, 1, 80, 81, at_s=1.0, idle=idle)
    ordered = Mock(wraps=idle._ordered)
    idle._ordered = ordered  # type: ignore[method-assign]
    for number in range(40):
        idle.pop(1, 20.0 + 0.002 * number)
    assert ordered.call_count == 1


def test_a_queue_that_is_not_in_the_order_is_chosen_at_once() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(1, 2, 3, keep=Keep(still_s=MINUTE_S, session=1), idle=idle)
    assert idle.pop(1, 1.0) == [3]
    idle_of(4, at_s=1.0, keep=Keep(session=2), idle=idle)
    assert idle.pop(1, 1.0) == [4]  # evicted before blocks with a promise
    assert idle.pop(1, 1.0) == [2]
    idle_of(5, at_s=1.0, keep=Keep(session=3), idle=idle)
    idle_of(6, at_s=1.0, keep=Keep(0.0, session=4), idle=idle)
    assert idle.pop(2, 1.0) == [6, 5]  # the ended session is first


def test_an_order_that_is_a_moment_old_evicts_no_likelier_block() -> None:
    idle = IdleBlocks(BLOCKS)
    idle_of(0, 1, keep=Keep(session=1), at_s=0.0, idle=idle)
    for number in range(4):  # one-shot prompts, each in a hundredth of a second
        now_s = 0.01 * (1 + number)
        idle_of(2, 3, keep=Keep(0.1), at_s=now_s, idle=idle)
        assert idle.pop(2, now_s + 0.005) == [3, 2]
