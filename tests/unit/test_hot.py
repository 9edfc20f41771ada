"""The prefixes that save the most are common to many prompts; a chat's history is not."""

import random

import numpy as np
import pytest

from kvroute.blocks.fingerprint import Feature, fingerprints, root
from kvroute.contract.generation import TokenIds
from kvroute.router.prefixes.hot import MAX_PREFIXES, MEMORY_S, HotPrefix, HotPrefixes

BLOCK = 4
ROOT = root(model="m", block_size=BLOCK)


def text(seed: int, blocks: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 10**6, blocks * BLOCK).astype(np.uint32)


class Fleet:
    """One unbounded cache; the prefixes of its prompts are counted."""

    def __init__(self) -> None:
        self.hot = HotPrefixes(block_size=BLOCK)
        self.now_s = 0.0
        self._held: set[int] = set()

    def ask(self, *parts: TokenIds, image_at: int | None = None) -> None:
        """Send a prompt of these parts, 0.1 s after the last one."""
        self.now_s += 0.1
        token_ids = np.concatenate(parts)
        features = [] if image_at is None else [Feature("cat", image_at, 5)]
        chain = fingerprints(token_ids, block_size=BLOCK, parent=ROOT, features=features)
        cached = next((i for i, f in enumerate(chain) if f not in self._held), len(chain))
        self._held.update(chain)
        self.hot.record(token_ids, chain, cached * BLOCK, self.now_s, features)

    def top(self, count: int = 10) -> list[HotPrefix]:
        return self.hot.top(count, self.now_s)


def same(hot: HotPrefix, *parts: TokenIds) -> bool:
    return np.array_equal(hot.token_ids, np.concatenate(parts))


def test_the_common_prefix_of_many_prompts_is_found_with_its_length() -> None:
    fleet, system = Fleet(), text(0, 20)
    for number in range(1, 50):
        fleet.ask(system, text(number, 5))
    (first,) = fleet.top()
    assert same(first, system)


def test_a_prefix_ends_before_its_first_image() -> None:
    fleet, shared = Fleet(), text(0, 20)
    for number in range(1, 50):
        fleet.ask(shared, text(number, 5), image_at=12 * BLOCK + 3)
    (first,) = fleet.top()
    assert same(first, shared[: 12 * BLOCK])


def test_chats_count_for_what_they_share() -> None:
    """Ten chats with many turns: only the turns of a chat share its history."""
    fleet, system = Fleet(), text(0, 20)
    histories = [[system, text(n, 1)] for n in range(1, 11)]
    for turn in range(20):
        for n, history in enumerate(histories):
            history.append(text(1000 * n + turn + 100, 3))
            fleet.ask(*history)
    assert same(fleet.top()[0], system)


def test_a_prefix_that_is_only_used_in_a_longer_one_is_not_listed() -> None:
    fleet, system, document = Fleet(), text(0, 4), text(1, 30)
    fleet.ask(system)
    fleet.ask(system, text(2, 3))
    for number in range(3, 60):
        fleet.ask(system, document, text(number, 2))
    (first,) = fleet.top()
    assert same(first, system, document)


def test_two_nested_prefixes_are_listed_if_both_are_used() -> None:
    fleet, system, document = Fleet(), text(0, 4), text(1, 30)
    for number in range(2, 60, 2):
        fleet.ask(system, text(number, 2))
        fleet.ask(system, document, text(number + 1, 2))
    longer, shorter = fleet.top()
    assert same(longer, system, document)
    assert same(shorter, system)


def test_rates_are_tokens_saved_per_second() -> None:
    fleet, system = Fleet(), text(0, 10)
    for number in range(1, 6000):  # ten requests per second for ten minutes
        fleet.ask(system, text(number, 1))
    (first,) = fleet.top()
    assert first.requests_per_s(fleet.now_s) == pytest.approx(10, rel=0.01)
    assert first.tokens_saved_per_s(fleet.now_s) == pytest.approx(10 * 10 * BLOCK, rel=0.01)
    later_s = fleet.now_s + 10 * MEMORY_S
    assert first.requests_per_s(later_s) < 0.001


def test_the_number_of_prefixes_is_bounded_and_the_hottest_stay() -> None:
    fleet, system, rng = Fleet(), text(0, 10), random.Random(1)
    for number in range(1, 4 * MAX_PREFIXES):
        once = text(number, 2 + rng.randrange(20))
        fleet.ask(once)
        fleet.ask(once)
        fleet.ask(system, text(10_000 + number, 1))
        assert len(fleet.hot._prefixes) <= 2 * MAX_PREFIXES
    assert same(fleet.top()[0], system)


def test_a_prefix_that_is_not_cached_is_not_hot() -> None:
    hot = HotPrefixes(block_size=BLOCK)
    chain = fingerprints(text(0, 5), block_size=BLOCK, parent=ROOT)
    for _ in range(3):
        hot.record(text(0, 5), chain, 0, 1.0)
    assert hot.top(10, 1.0) == []
