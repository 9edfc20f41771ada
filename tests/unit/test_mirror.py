"""The mirror equals the truth, and finds how far each replica's match goes."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint, pack
from kvroute.blocks.tiers import HOST
from kvroute.router.index.masks import Masks
from kvroute.router.index.mirror import GENERATION, INDEX_DELAY_S, Mirror
from tests.support.mirrors import held_by

CHAIN = [Fingerprint(1000 + i) for i in range(200)]
replicas = st.sampled_from(["a", "b", "c"])
blocks = st.lists(st.integers(0, 30).map(Fingerprint), max_size=8)
operations: st.SearchStrategy[tuple[str, str, list[Fingerprint]]] = st.one_of(
    st.tuples(st.sampled_from(["add", "remove"]), replicas, blocks),
    st.tuples(st.sampled_from(["join", "drop", "sweep"]), replicas, st.just([])),
)


def holding(**depths: int) -> Mirror:
    mirror = Mirror()
    for replica_id, depth in depths.items():
        mirror.join(replica_id)
        mirror.add(replica_id, CHAIN[:depth])
    return mirror


@given(st.lists(operations, max_size=60))
def test_the_mirror_equals_the_truth_after_any_sequence_of_events(
    steps: list[tuple[str, str, list[Fingerprint]]],
) -> None:
    mirror, truth = Mirror(), dict[str, set[Fingerprint]]()
    for verb, replica_id, fingerprints in steps:
        if verb == "join":
            truth[replica_id] = set()
            mirror.join(replica_id)
        elif verb == "drop":
            truth.pop(replica_id, None)
            mirror.drop(replica_id)
        elif verb == "sweep":
            mirror.sweep()
        elif replica_id in truth:
            getattr(mirror, verb)(replica_id, fingerprints)
            truth[replica_id].update(fingerprints)
            if verb == "remove":
                truth[replica_id].difference_update(fingerprints)
    assert {r: held_by(mirror, r) for r in mirror.replica_ids} == truth


@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, len(CHAIN))), st.integers(0, 200)
)
def test_each_replicas_depth_is_found_exactly(depths: dict[str, int], prompt_blocks: int) -> None:
    hits = holding(**depths).hits(CHAIN[:prompt_blocks])
    assert hits == {r: min(d, prompt_blocks) for r, d in depths.items() if min(d, prompt_blocks)}


@given(st.sets(st.integers(0, 40)))
def test_a_chain_with_holes_counts_no_more_than_the_prompt_has(held: set[int]) -> None:
    mirror = holding(a=0)
    mirror.add("a", [CHAIN[i] for i in held])
    assert all(0 < depth <= 41 for depth in mirror.hits(CHAIN[:41]).values())


def test_a_thousand_block_prompt_costs_few_reads() -> None:
    class Counting(Masks):
        reads = 0

        def get(self, fingerprint: Fingerprint) -> int:
            self.reads += 1
            return super().get(fingerprint)

    chain = [Fingerprint(i) for i in range(1000)]
    mirror = Mirror()
    mirror._held = counting = Counting()
    mirror.join("a")
    mirror.add("a", chain[:700])
    assert mirror.hits(chain) == {"a": 700}
    assert counting.reads <= 25


def tiered(**depths: tuple[int, int]) -> Mirror:
    """Return a mirror; `depths` has each replica's leading blocks in GPU and in host memory."""
    mirror = holding(**{replica_id: gpu for replica_id, (gpu, _) in depths.items()})
    mirror.set_tiers(dict.fromkeys(depths.keys(), (HOST,)))
    for replica_id, (_, host) in depths.items():
        mirror.add(replica_id, map(HOST.fingerprint, CHAIN[:host]))
    return mirror


depth = st.integers(0, len(CHAIN))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(depth, depth)), depth)
def test_the_hit_with_host_memory_is_the_longer_one_of_both_tiers(
    depths: dict[str, tuple[int, int]], prompt_blocks: int
) -> None:
    def expected(depth_of: Callable[[tuple[int, int]], int]) -> dict[str, int]:
        blocks = {r: min(depth_of(pair), prompt_blocks) for r, pair in depths.items()}
        return {r: count for r, count in blocks.items() if count}

    mirror, chain = tiered(**depths), CHAIN[:prompt_blocks]
    assert mirror.hits(chain) == expected(lambda pair: pair[0])
    assert mirror.hits(chain, tiers=(HOST,)) == expected(max)


def test_host_memory_counts_only_on_replicas_that_have_a_host_tier() -> None:
    mirror = tiered(a=(3, 9), b=(5, 9))
    mirror.set_tiers(dict.fromkeys({"b"}, (HOST,)))
    assert mirror.hits(CHAIN, tiers=(HOST,)) == {"b": 9}
    mirror.set_tiers({})
    assert mirror.hits(CHAIN, tiers=(HOST,)) == {}
    assert mirror.hits(CHAIN) == {"a": 3, "b": 5}


def test_a_replica_keeps_its_host_tier_when_it_clears_its_cache_or_joins_again() -> None:
    mirror = tiered(a=(3, 9))
    mirror.join("a")
    assert mirror.hits(CHAIN, tiers=(HOST,)) == {}
    mirror.add("a", map(HOST.fingerprint, CHAIN[:4]))
    assert mirror.hits(CHAIN, tiers=(HOST,)) == {"a": 4}


def test_a_block_that_is_still_in_host_memory_does_not_count_as_evicted() -> None:
    mirror = tiered(a=(9, 9))
    mirror.remove("a", CHAIN[:9])
    assert (len(mirror._history), mirror.known_blocks(CHAIN)) == (0, 9)
    mirror.remove("a", map(HOST.fingerprint, CHAIN[5:9]))
    assert (len(mirror._history), mirror.known_blocks(CHAIN)) == (4, 9)
    assert mirror.hits(CHAIN, tiers=(HOST,)) == {"a": 5}


@given(st.permutations(["a", "b"]), st.booleans())
def test_a_block_evicted_from_both_tiers_is_once_in_the_history(
    leave: list[str], is_swept: bool
) -> None:
    mirror = tiered(a=(50, 50), b=(50, 50))
    for replica_id in leave:
        if is_swept:
            mirror.drop(replica_id)
        else:
            mirror.remove(replica_id, CHAIN[:50])
            mirror.remove(replica_id, map(HOST.fingerprint, CHAIN[:50]))
    while mirror.sweep():
        pass
    assert (len(mirror), len(mirror._history), mirror.known_blocks(CHAIN)) == (0, 50, 50)


def test_a_prompt_without_a_full_block_hits_nothing() -> None:
    assert holding(a=5).hits([]) == {}


def test_expected_blocks_extend_the_hit_until_they_are_no_longer_expected() -> None:
    mirror = holding(a=3)
    mirror.expect("a", CHAIN[3:7])
    assert mirror.hits(CHAIN) == {"a": 7}
    mirror.unexpect("a", CHAIN[3:7])
    assert mirror.hits(CHAIN) == {"a": 3}


def test_a_dropped_replica_is_unknown_at_once_and_its_bit_is_reused_only_after_a_sweep() -> None:
    mirror = holding(a=5, b=9)
    mirror.drop("a")
    assert mirror.hits(CHAIN) == {"b": 9}
    mirror.join("c")
    assert mirror.hits(CHAIN) == {"b": 9}
    while mirror.sweep():
        pass
    mirror.join("d")
    assert mirror.hits(CHAIN) == {"b": 9}


def test_blocks_expected_on_an_unknown_replica_are_ignored() -> None:
    mirror = holding(a=5)
    mirror.expect("b", CHAIN)
    assert len(mirror._expected) == 0


def test_blocks_that_change_together_share_one_mask() -> None:
    mirror = Mirror()
    for replica_id in (f"r{i}" for i in range(64)):
        mirror.join(replica_id)
        mirror.add(replica_id, CHAIN)
    mirror.remove("r7", CHAIN)
    assert len({id(mirror._held.get(fingerprint)) for fingerprint in CHAIN}) == 1


class Truth:
    """One replica's blocks as `presume` means them."""

    def __init__(self, held: int) -> None:
        self.old, self.young = set(CHAIN[:held]), set[Fingerprint]()

    def infer(self, chain: list[Fingerprint], capacity_blocks: int) -> None:
        self.young.update(chain)
        if len(self.young) >= capacity_blocks:
            self.old, self.young = self.young, set()

    def depth(self, chain: list[Fingerprint]) -> int:
        return max(
            next((i for i, block in enumerate(chain) if block not in held), len(chain))
            for held in (self.old, self.young)
        )


@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from("xyz"), st.integers(1, 30))))
def test_inferred_blocks_replace_older_ones_when_they_fill_the_cache(
    held: int, sent: list[tuple[str, int]]
) -> None:
    documents = {"x": CHAIN[:30], "y": CHAIN[30:60], "z": CHAIN[60:90]}
    mirror, truth = holding(a=held), Truth(held)
    mirror.is_fed = False
    for document, depth in sent:
        mirror.infer("a", documents[document][:depth], capacity_blocks=40)
        truth.infer(documents[document][:depth], capacity_blocks=40)
        mirror.sweep()
    assert held_by(mirror, "a") == truth.old | truth.young
    for chain in documents.values():
        assert mirror.hits(chain).get("a", 0) == truth.depth(chain)


def test_nothing_is_inferred_while_the_index_reports_changes() -> None:
    mirror = holding(a=3)
    mirror.infer("a", CHAIN[:10], capacity_blocks=100)
    assert mirror.hits(CHAIN) == {"a": 3}
    assert not mirror.inferred


def test_a_replica_that_joins_loses_its_inferred_blocks() -> None:
    mirror = holding(a=3)
    mirror.is_fed = False
    mirror.infer("a", CHAIN[:10], capacity_blocks=100)
    mirror.join("a")
    assert mirror.hits(CHAIN) == {}
    assert not mirror.inferred


def test_blocks_expected_after_inferred_ones_extend_the_hit() -> None:
    mirror = holding(a=0)
    mirror.is_fed = False
    mirror.infer("a", CHAIN[:10], capacity_blocks=100)
    mirror.expect("a", CHAIN[10:12])
    assert mirror.hits(CHAIN) == {"a": 12}
    mirror.unexpect("a", CHAIN[10:12])
    assert mirror.hits(CHAIN) == {"a": 10}


@given(st.lists(blocks.map(lambda given: (given, "abc"[len(given) % 3])), max_size=5), blocks)
def test_loading_a_replica_at_once_equals_adding_its_blocks(
    held: list[tuple[list[Fingerprint], str]], loaded: list[Fingerprint]
) -> None:
    mirrors = holding(a=0, b=0, c=0), holding(a=0, b=0, c=0)
    for mirror in mirrors:
        for fingerprints, replica_id in held:
            mirror.add(replica_id, fingerprints)
    mirrors[0].join("a")
    mirrors[0].add("a", loaded)
    for _ in mirrors[1].load("a", pack(set(loaded))):
        pass
    assert all(held_by(mirrors[0], id_) == held_by(mirrors[1], id_) for id_ in "abc")


def test_a_sweep_frees_blocks_that_only_dropped_replicas_held() -> None:
    mirror = holding(a=50, b=20)
    mirror.drop("a")
    while mirror.sweep():
        pass
    assert len(mirror) == 20


def test_a_replica_dropped_during_a_sweep_is_cleaned_by_the_next_one() -> None:
    mirror = holding(a=50, b=20)
    mirror.drop("a")
    mirror.sweep()
    mirror.drop("b")
    while mirror.sweep():
        pass
    assert len(mirror) == 0


def test_blocks_that_were_evicted_cleared_or_lost_are_known_and_later_ones_are_new() -> None:
    mirror = holding(a=50, b=10)
    mirror.remove("a", CHAIN[40:50])
    assert mirror.known_blocks(CHAIN) == 50
    mirror.join("a")
    mirror.drop("b")
    assert (mirror.hits(CHAIN), mirror.known_blocks(CHAIN)) == ({}, 50)
    while mirror.sweep():
        pass
    assert (len(mirror), mirror.known_blocks(CHAIN), mirror.known_blocks(CHAIN, at_least=60)) == (
        0,
        50,
        60,
    )


def test_blocks_evicted_long_ago_are_forgotten() -> None:
    mirror = holding(a=50)
    mirror.join("a")
    while mirror.sweep():
        pass
    mirror.add("a", others := [Fingerprint(10_000 + i) for i in range(2 * GENERATION)])
    mirror.remove("a", others)
    assert (mirror.known_blocks(CHAIN), mirror.known_blocks(others[-10:])) == (0, 10)


def test_blocks_that_a_request_computed_are_expected_until_the_index_reports_them() -> None:
    mirror = Mirror()
    mirror.join("a")
    mirror.expect("a", CHAIN[:4])
    mirror.record_computed("a", CHAIN[:4], 10.0)
    mirror.forget_computed(10.0 + INDEX_DELAY_S / 2)
    assert mirror.hits(CHAIN) == {"a": 4}
    mirror.add("a", CHAIN[:2])
    mirror.remove("a", CHAIN[1:2])
    assert mirror.hits(CHAIN) == {
        "a": 1
    }  # the index reported these blocks, and then their eviction
    mirror.forget_computed(10.0 + INDEX_DELAY_S)
    assert not mirror.is_held("a", CHAIN[3])
    assert mirror.hits(CHAIN[2:]) == {}
