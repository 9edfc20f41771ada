"""The router's hit equals vLLM's, after any requests, evictions and clears, for each kind of group.

vLLM's own managers run without a model; their events take the way of a replica's.
"""

import random
from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import NO_TOKENS, GenerateRequest
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.router.placement.fleet import Fleet
from tests.support.kv_shapes import SHAPES, cache_of
from tests.support.records import record

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

UNIT = 16
EVERYBODY = Scope()
scopes = st.builds(
    Scope,
    namespace=st.sampled_from(["", "a", "b:c"]),
    shared_tokens=st.sampled_from([0, UNIT, 4 * UNIT, 12 * UNIT]),
)
TEXTS: list[list[int]] = [
    np.random.default_rng(n).integers(0, 40_000, 400).tolist() for n in range(3)
]


class Side:
    """One engine's cache, and a router that hears of it."""

    def __init__(self, name: str, blocks: int = 60) -> None:
        self.cache = cache_of(name, blocks=blocks)
        division = self.cache.division
        self.table = BlockTable(division.group_entries)
        self.fleet = Fleet(model="m", revision="", block_size=UNIT, rng=random.Random(0))
        self.fleet.mirror.join("a")
        self.fleet.update([record("a", block_size=UNIT, layout=division.layout)])

    def expected(self, prompt: list[int], scope: Scope = EVERYBODY) -> int:
        """Tokens of the hit, as the router knows."""
        changes = Changes()
        self.table.apply(self.cache.events(), changes)
        if changes.cleared:
            self.fleet.mirror.join("a")
        self.fleet.mirror.remove("a", changes.removed)
        self.fleet.mirror.add("a", changes.added)
        token_ids = np.array(prompt, dtype=np.uint32)
        return self.fleet.place(token_ids, ["a"], 0.0, scope).expected_tokens("a")


def prompts() -> st.SearchStrategy[list[int]]:
    """Beginnings of some texts, and some that leave one for another."""
    cut = st.integers(1, 400)

    def joined(first: int, second: int, at: int, length: int) -> list[int]:
        return (TEXTS[first][:at] + TEXTS[second])[:length]

    text = st.integers(0, len(TEXTS) - 1)
    return st.builds(joined, text, text, cut, cut)


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=40)
@given(steps=st.lists(prompts() | st.none(), min_size=2, max_size=12))
def test_the_routers_hit_is_vllms(name: str, steps: list[list[int] | None]) -> None:
    side = Side(name)
    for prompt in steps:
        if prompt is None:
            side.cache.manager.reset_prefix_cache()
        else:
            assert side.expected(prompt) == side.cache.hit(prompt)
            try:
                hit = side.cache.run(prompt)
            except MemoryError:
                continue
            assert hit % UNIT == 0


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=30)
@given(steps=st.lists(st.tuples(prompts(), scopes), min_size=2, max_size=12))
def test_vllm_shares_what_tenants_share_and_nothing_else(
    name: str, steps: list[tuple[list[int], Scope]]
) -> None:
    side = Side(name, blocks=600)
    seen: list[tuple[list[int], Scope]] = []
    for prompt, scope in steps:
        salted = {"namespace": salt_of(scope)}
        hit = side.cache.hit(prompt, **salted)
        assert side.expected(prompt, scope) == hit
        assert hit <= max((common(prompt, scope, *each) for each in seen), default=0)
        assert side.cache.run(prompt, (), **salted) == hit
        seen.append((prompt, scope))


def salt_of(scope: Scope) -> str:
    from kvroute.replica.vllm_engine.blocks.cache_salt import cache_salt

    request = GenerateRequest("r", NO_TOKENS, scope.namespace, shared_tokens=scope.shared_tokens)
    return cache_salt(request) or ""


def common(one: list[int], ones: Scope, other: list[int], others: Scope) -> int:
    """Tokens that the two may share."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    same = sum(1 for _ in pairs)
    if ones == others or not (ones.namespace or others.namespace):
        return same
    parts = [each.shared_tokens for each in (ones, others) if each.namespace]
    return min(same, *parts)


def test_what_the_router_expects_is_what_a_repeated_prompt_finds() -> None:
    """Before the engine has told anything: the request is still being computed."""
    for name in SHAPES:
        side, prompt = Side(name, blocks=300), TEXTS[0]
        token_ids = np.array(prompt, dtype=np.uint32)
        placement = side.fleet.place(token_ids, ["a"], 0.0)
        side.fleet.sent(placement, "a", "r", 0.0)
        promised = side.fleet.place(token_ids, ["a"], 0.0).expected_tokens("a")
        side.cache.run(prompt)
        assert promised > 300
        assert (name, promised) == (name, side.cache.hit(prompt))


def test_every_layout_but_one_says_more_than_its_block_size() -> None:
    plain = [name for name in SHAPES if Side(name).cache.division.layout is None]
    assert plain == ["plain"]
