"""vLLM's own block pool with our free queue: which blocks it gives to new tokens."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.contract.keep import Order, RetentionHint

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

BLOCKS = 12

steps = st.lists(
    st.tuples(
        st.sampled_from(["get", "get", "free", "free", "touch", "evict", "pin", "reset"]),
        st.integers(0, 99),
    ),
    max_size=60,
)


class Side:
    """A pool and the blocks that its requests hold."""

    def __init__(self, *, ours: bool) -> None:
        from vllm.v1.core.block_pool import BlockPool

        from kvroute.replica.vllm_engine.blocks.free_queue import FreeQueue

        self.pool: Any = BlockPool(BLOCKS + 1, True, 16, enable_kv_cache_events=True)
        self.queue = FreeQueue(self.pool) if ours else None
        self.requests: list[list[Any]] = []
        self.hashes = count()

    def get(self, number: int) -> list[int]:
        """A request whose first blocks are full."""
        blocks = self.pool.get_new_blocks(min(1 + number % 4, self.pool.get_num_free_blocks()))
        for block in blocks[: 1 + number // 25]:
            key = next(self.hashes).to_bytes(36, "big")
            self.pool._insert_block_hash(key, block, num_tokens=16)
        self.requests.append(blocks)
        return [block.block_id for block in blocks]

    def free(self, number: int, keep: RetentionHint | None = None) -> None:
        if self.requests:
            blocks = self.requests.pop(number % len(self.requests))
            if self.queue and keep:
                self.queue.label(blocks, keep)
            self.pool.free_blocks(reversed(blocks))

    def touch(self, number: int) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash]
        if cached:
            blocks = [cached[number % len(cached)]]
            self.pool.touch(blocks)
            self.requests.append(blocks)

    def evict(self, number: int) -> None:
        self.pool.evict_blocks({1 + number % BLOCKS})

    def pin(self, number: int) -> None:
        """vLLM's: the block stays readable until it is used again."""
        if self.requests:
            blocks = self.requests.pop(number % len(self.requests))
            self.pool.unpin_blocks(blocks, lambda block: None)

    def reset(self, number: int) -> None:
        if self.pool.reset_prefix_cache() and self.queue:
            self.queue.clear()

    @property
    def state(self) -> Any:
        free = [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]
        return free, self.pool.get_num_free_blocks(), self.pool.take_events()


@settings(max_examples=150, deadline=None)
@given(steps, st.sampled_from([None, RetentionHint(), RetentionHint(session=7)]))
def test_with_nothing_said_the_pool_uses_the_same_blocks_as_with_its_own_queue(
    steps: list[tuple[str, int]], keep: RetentionHint | None
) -> None:
    ours, theirs = Side(ours=True), Side(ours=False)
    for what, number in steps:
        if what == "free":
            ours.free(number, keep)
            theirs.free(number)
        else:
            assert getattr(ours, what)(number) == getattr(theirs, what)(number)
        assert ours.state == theirs.state


@settings(max_examples=100, deadline=None)
@given(
    steps,
    st.lists(st.builds(RetentionHint, st.sampled_from(Order), st.integers(0, 3)), min_size=1),
)
def test_whatever_is_said_a_block_is_free_or_held(
    steps: list[tuple[str, int]], keeps: list[RetentionHint]
) -> None:
    side = Side(ours=True)
    for number, (what, choice) in enumerate(steps):
        if what == "free":
            side.free(choice, keeps[number % len(keeps)])
        else:
            getattr(side, what)(choice)
        held = {block.block_id for blocks in side.requests for block in blocks}
        assert sorted([*side.state[0], *held]) == [*range(1, BLOCKS + 1)]


def test_blocks_that_are_likely_to_come_back_outlive_newer_ones() -> None:
    side = Side(ours=True)
    likely, unlikely = side.get(99), side.get(99)
    side.free(0, RetentionHint(session=1))
    side.free(0, RetentionHint(Order.UNLIKELY, session=2))
    side.get(3)  # four that are blank
    assert side.get(99) == unlikely[::-1]
    assert side.get(99) == likely[::-1]


def test_an_offloading_connector_hears_of_what_goes_next_wherever_its_cursor_was() -> None:
    side = Side(ours=True)
    first, second = side.get(99), side.get(99)
    side.free(0, RetentionHint())
    side.free(0, RetentionHint(Order.UNLIKELY))
    held = side.get(3)
    assert side.queue
    for cursor in (None, first[0], held[0]):
        block = None if cursor is None else side.pool.blocks[cursor]
        after = [block.block_id for block in side.queue.iter_blocks_after(block)]
        assert after == [*second[::-1], *first[::-1]]


def hints_of(*sides: Side) -> Any:
    """As a scheduler has it; each pool has a group with all requests' blocks."""
    from kvroute.replica.vllm_engine.blocks.retention_hints import RetentionHints

    managers = [SimpleNamespace(block_pool=side.pool, req_to_blocks={}) for side in sides]
    manager: Any = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=managers))
    return RetentionHints(manager, [side.pool for side in sides])


def request_of(name: str, keep: RetentionHint) -> Any:
    from kvroute.contract.generation import NO_TOKENS, GenerateRequest
    from kvroute.replica.vllm_engine.blocks.retention_hints import hint_args

    args = hint_args(GenerateRequest(name, NO_TOKENS, keep=keep))
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=args))


def test_the_end_of_a_session_reaches_all_pools_and_requests_that_run() -> None:
    sides = Side(ours=False), Side(ours=False)
    hints = hints_of(*sides)
    left, stays, running = (
        request_of(name, RetentionHint(session=n)) for n, name in enumerate("abc", 1)
    )
    held = []
    for side, manager in zip(sides, hints._managers, strict=True):
        held.append([side.get(99) for _ in "abc"])
        manager.req_to_blocks |= dict(zip("abc", side.requests, strict=True))
    for request in (stays, left):
        hints.label(request)
        for side, manager in zip(sides, hints._managers, strict=True):
            side.pool.free_blocks(reversed(manager.req_to_blocks[request.request_id]))
    for session in (1, 3):
        hints.end(session, [running])
    hints.label(running)
    for side, manager in zip(sides, hints._managers, strict=True):
        side.pool.free_blocks(reversed(manager.req_to_blocks["c"]))
    for side, (of_left, of_stays, of_running) in zip(sides, held, strict=True):
        assert [side.get(99) for _ in "abc"] == [of_left[::-1], of_running[::-1], of_stays[::-1]]
