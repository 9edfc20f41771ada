"""Where hits end in engines with several cache groups, against the rules written down plainly."""

import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.cache_groups import (
    CHUNK,
    FULL,
    HOST_GROUPS,
    STATE,
    CacheGroup,
    Layout,
    group_fingerprint,
)
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.router.index.boundaries import Boundaries, UnknownLayoutError
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.fleet import Fleet
from tests.support.records import record

UNIT = 4  # tokens per block that has a fingerprint
CHAIN = [Fingerprint(random.Random(i).getrandbits(64)) for i in range(40)]
REPLICAS = ("a", "b", "c")

Held = set[tuple[int, int]]  # cached blocks: the number of the group, and the end in tokens


def layouts() -> st.SearchStrategy[Layout]:
    def laid_out(blocks: int, windows: Sequence[int], kinds: list[str], more: int) -> Layout:
        size, groups = blocks * UNIT, list[CacheGroup]()
        for kind, window in zip(kinds, windows, strict=False):
            has_window = kind in ("sliding_window", "chunked_local_attention")
            groups.append(CacheGroup(kind, size, window * UNIT // 2 if has_window else 0))
        groups.sort(key=lambda group: group.kind not in FULL)
        if more > 1:  # the last group has blocks of another size
            last = groups[-1]
            groups[-1] = CacheGroup(last.kind, size * more, last.window_tokens)
        return Layout(tuple(groups), size * more)

    kinds = ["full_attention", "sliding_window", "chunked_local_attention", "mamba"]
    return st.builds(
        laid_out,
        st.integers(1, 3),
        st.lists(st.integers(3, 30), min_size=3, max_size=3),
        st.lists(st.sampled_from(kinds), min_size=1, max_size=3),
        st.integers(1, 2),
    )


def can_serve(group: CacheGroup, tokens: int, has: Callable[[int], bool]) -> bool:
    """Whether the group can serve a hit of so many tokens, as vLLM's managers say it."""
    size = group.block_tokens
    if tokens % size:
        return False
    if group.kind in STATE:
        return has(tokens)
    ends = range(size, tokens + 1, size)
    if group.kind in FULL:
        return all(map(has, ends))
    if group.kind in CHUNK:
        begin = tokens // group.window_tokens * group.window_tokens // size * size
    else:
        begin = max(0, tokens - -(-(group.window_tokens - 1) // size) * size)
    return all(has(end) for end in ends if end > begin)


def hit(layout: Layout, held: Held, blocks: int) -> int:
    """In blocks of the fingerprints' size."""
    for tokens in range(blocks * UNIT, 0, -UNIT):
        if tokens % layout.hit_tokens == 0 and all(
            can_serve(group, tokens, lambda end: (number, end) in held)  # noqa: B023
            for number, group in enumerate(layout.groups)
        ):
            return tokens // UNIT
    return 0


def all_blocks(layout: Layout) -> list[tuple[int, int]]:
    return [
        (number, end)
        for number, group in enumerate(layout.groups)
        for end in range(group.block_tokens, len(CHAIN) * UNIT + 1, group.block_tokens)
    ]


@given(layouts(), st.randoms(use_true_random=False), st.integers(0, len(CHAIN)))
def test_the_hit_is_the_deepest_boundary_that_every_group_can_serve(
    layout: Layout, rng: random.Random, blocks: int
) -> None:
    mirror, holds = Mirror(), dict[str, Held]()
    for replica in REPLICAS:
        share = rng.choice([0.0, 0.5, 0.9, 0.97, 1.0])
        holds[replica] = {block for block in all_blocks(layout) if rng.random() < share}
        mirror.join(replica)
        mirror.add(
            replica,
            [group_fingerprint(CHAIN[end // UNIT - 1], number) for number, end in holds[replica]],
        )
    found = mirror.hits(CHAIN[:blocks], layout=Boundaries(layout, UNIT))
    expected = {replica: hit(layout, holds[replica], blocks) for replica in REPLICAS}
    assert found == {replica: depth for replica, depth in expected.items() if depth}


@given(layouts(), st.randoms(use_true_random=False), st.integers(0, len(CHAIN)))
def test_a_boundary_is_served_by_both_tiers_together(
    layout: Layout, rng: random.Random, blocks: int
) -> None:
    mirror, holds = Mirror(), dict[str, Held]()
    for replica in REPLICAS:
        mirror.join(replica)
        holds[replica] = set()
        for first_group in (0, HOST_GROUPS):
            held = {block for block in all_blocks(layout) if rng.random() < 0.9}
            holds[replica] |= held
            members = (
                group_fingerprint(CHAIN[end // UNIT - 1], first_group + group)
                for group, end in held
            )
            mirror.add(replica, members)
    mirror.set_tiers(dict.fromkeys(REPLICAS, (HOST,)))
    found = mirror.hits(CHAIN[:blocks], tiers=(HOST,), layout=Boundaries(layout, UNIT))
    expected = {replica: hit(layout, holds[replica], blocks) for replica in REPLICAS}
    assert found == {replica: depth for replica, depth in expected.items() if depth}


@given(layouts(), st.integers(0, len(CHAIN)), st.integers(0, len(CHAIN)))
def test_a_computed_prompt_is_a_hit_as_a_whole(layout: Layout, blocks: int, begin: int) -> None:
    boundaries, mirror = Boundaries(layout, UNIT), Mirror()
    mirror.join("a")
    chain = CHAIN[: boundaries.usable(blocks)]
    computed = boundaries.usable(min(begin, blocks))
    mirror.expect("a", boundaries.added(CHAIN[:computed], 0))
    mirror.expect("a", boundaries.added(chain, computed))
    assert mirror.hits(chain, layout=boundaries).get("a", 0) == len(chain)


@given(layouts(), st.randoms(use_true_random=False), st.integers(0, len(CHAIN)))
def test_the_hit_of_the_first_group_alone_is_found(
    layout: Layout, rng: random.Random, blocks: int
) -> None:
    mirror, first = Mirror(), layout.groups[0]
    mirror.join("a")
    held = {(0, end) for number, end in all_blocks(layout) if not number and rng.random() < 0.9}
    mirror.add("a", [group_fingerprint(CHAIN[end // UNIT - 1], 0) for _, end in held])
    found = mirror.first_group_hit(CHAIN[:blocks], Boundaries(layout, UNIT))
    assert found == hit(Layout((first,), layout.hit_tokens), held, blocks)


def test_a_prompt_that_lacks_only_states_does_not_count_as_evicted() -> None:
    fleet = new_fleet()
    layout = Layout((CacheGroup("full_attention", 8), CacheGroup("mamba", 16)), 16)
    fleet.mirror.join("a")
    fleet.update([record("a", layout=layout)])
    fleet.mirror.add("a", fleet.caches.added("a", CHAIN[:24]))  # with states at its end only
    placement = fleet.place_chain(CHAIN[:17], 17 * UNIT, ["a"], 0.0)
    assert (placement.best_hit_blocks, placement.partial_blocks) == (0, 16)
    assert placement.evicted_tokens == 0
    again = fleet.place_chain(CHAIN[:25], 25 * UNIT, ["a"], 0.0)
    assert (again.best_hit_blocks, again.partial_blocks) == (24, 24)


@given(layouts(), st.integers(0, len(CHAIN)))
def test_a_boundary_stays_known_after_its_blocks_are_evicted(layout: Layout, blocks: int) -> None:
    boundaries, mirror = Boundaries(layout, UNIT), Mirror()
    mirror.join("a")
    chain = CHAIN[: boundaries.usable(blocks)]
    mirror.add("a", boundaries.added(chain, 0))
    mirror.remove("a", boundaries.added(chain, 0))
    assert boundaries.known_blocks(CHAIN, mirror.is_known) == len(chain)
    if any(group.kind not in CHUNK for group in layout.groups):  # a chunk's end needs no block
        assert not mirror.hits(CHAIN, layout=boundaries)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout((CacheGroup("telepathy", 8),), 8), "telepathy"),
        (Layout((CacheGroup("full_attention", 6),), 6), "blocks of 6 tokens.*--block-size 4"),
        (Layout((CacheGroup("full_attention", 8),), 10), "10 tokens"),
    ],
)
def test_a_replica_with_an_unknown_layout_is_degraded_and_has_no_hits(
    layout: Layout, reason: str
) -> None:
    with pytest.raises(UnknownLayoutError, match=reason):
        Boundaries(layout, UNIT)
    fleet = new_fleet()
    fleet.mirror.join("a")
    fleet.mirror.add("a", CHAIN)
    fleet.update([record("a", layout=layout)])
    assert fleet.replicas.degraded.keys() == {"a"}
    placement = fleet.place_chain(CHAIN, 200, ["a"], 0.0)
    assert (placement.best_hit_blocks, placement.candidate("a").hit_blocks) == (0, 0)
    assert fleet.caches.added("a", CHAIN) == ()


def test_each_replica_is_ranked_by_its_own_layout() -> None:
    """As while another version is rolled out."""
    fleet = new_fleet()
    layout = Layout((CacheGroup("full_attention", 8), CacheGroup("mamba", 16)), 16)
    for replica in ("plain", "hybrid", "stateless"):
        fleet.mirror.join(replica)
    fleet.update(
        [record("plain"), *(record(id_, layout=layout) for id_ in ("hybrid", "stateless"))]
    )
    fleet.mirror.add("plain", CHAIN[:7])
    fleet.mirror.add("stateless", CHAIN[:7])
    fleet.mirror.add("hybrid", fleet.caches.added("hybrid", CHAIN[:7]))
    assert fleet.caches.hits(CHAIN[:9]) == {"plain": 7, "hybrid": 4}
    assert fleet.caches.least_blocks == 4


def new_fleet() -> Fleet:
    return Fleet(model="m", revision="", block_size=UNIT, rng=random.Random(0))
