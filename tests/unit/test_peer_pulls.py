"""Placement of prompts that a replica can pull from another replica's host memory."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from prometheus_client import CollectorRegistry

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST, PEER, TierBlocks
from kvroute.contract.generation import Chunk
from kvroute.contract.pull import PullAccess, PullResult, Reason
from kvroute.contract.records import Load, ReplicaRecord, TierFacts
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.placement.attempts import Attempt, Placement
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate, PeerPull
from kvroute.router.placement.receipts import receipt
from tests.support.records import record

BLOCK = 4  # tokens; a replica computes 1000 a second, so 4 ms for a block
CHAIN = [Fingerprint(1000 + i) for i in range(200)]
TIER = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e7)  # 0.1 ms for a block
LINK = Load(pull_latency_s=0.002, pull_bytes_per_s=1e6)  # 1 ms for a block


def peer(replica_id: str, load: Load = LINK, **differs: Any) -> ReplicaRecord:
    """Return the record of a replica that exchanges blocks."""
    fields: dict[str, Any] = {
        "host": TIER,
        "format": "f",
        "blocks_address": f"{replica_id}:1",
    } | differs
    return structs.replace(record(replica_id, **fields), load=load)


def fleet_of(*records: ReplicaRecord) -> Fleet:
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    for each in records:
        fleet.mirror.join(each.id)
    fleet.update(records)
    return fleet


def hold(fleet: Fleet, replica_id: str, blocks: int) -> None:
    """Let a replica have leading blocks of CHAIN, in GPU memory and in host memory."""
    fleet.mirror.add(replica_id, CHAIN[:blocks])
    fleet.mirror.add(replica_id, map(HOST.fingerprint, CHAIN[:blocks]))


def place(fleet: Fleet, at_s: float = 0.0) -> Placement:
    running = [each.id for each in fleet.replicas.records]
    return fleet.place_chain(CHAIN, BLOCK * len(CHAIN) + 1, running, at_s)


def pull_at(fleet: Fleet, replica_id: str, at_s: float = 0.0) -> PeerPull | None:
    return place(fleet, at_s).candidate(replica_id).pull


def planned(fleet: Fleet, replica_id: str, at_s: float = 0.0) -> PeerPull:
    pull = pull_at(fleet, replica_id, at_s)
    assert pull is not None
    return pull


def two(*, held: int = 100, **differs: Any) -> Fleet:
    """Return a fleet of a, which has leading blocks of CHAIN, and b, which has none."""
    fleet = fleet_of(peer("a"), peer("b", **differs))
    hold(fleet, "a", held)
    return fleet


def end(fleet: Fleet, attempt: Attempt, reason: Reason = "", *, took_s: float = 0.1) -> None:
    """Let the attempt's pull end at second 1. It copied 100 blocks, unless it failed."""
    tokens = 0 if reason else 100 * BLOCK
    result = PullResult(tokens, tokens // BLOCK * TIER.block_bytes, took_s, reason)
    attempt.receive(Chunk((1,), tokens, is_last=True, pulled=result), 1.0)
    attempt.end()


def without_pulls(candidate: Candidate) -> Candidate:
    return candidate._replace(pull=None)


def test_a_replica_pulls_what_another_one_has_in_host_memory() -> None:
    there = place(two()).candidate("b")
    assert there.pull is not None
    assert (there.pull.peer_id, there.pull.blocks, there.hit_blocks) == ("a", 100, 100)
    assert there.reloads == (TierBlocks(PEER, 100),)
    assert there.copy_s == 0.0
    assert there.pull_s == pytest.approx(0.002 + 0.1 + 0.01)


def test_a_pull_continues_after_the_replicas_own_hit() -> None:
    fleet = two()
    hold(fleet, "b", 60)
    there = place(fleet).candidate("b")
    assert there.hit_blocks == 100
    assert there.pull_s == pytest.approx(0.002 + 0.04 + 0.004)


def test_the_replica_with_the_blocks_pulls_nothing() -> None:
    assert pull_at(two(), "a") is None


def test_blocks_in_gpu_memory_alone_cannot_be_pulled() -> None:
    fleet = fleet_of(peer("a"), peer("b"))
    fleet.mirror.add("a", CHAIN[:100])
    assert pull_at(fleet, "b") is None


def test_a_link_that_is_slower_than_computing_is_not_used() -> None:
    slow = Load(pull_latency_s=0.002, pull_bytes_per_s=1e4)
    assert pull_at(two(load=slow), "b") is None


@pytest.mark.parametrize(
    "differs",
    [
        {"format": "other"},
        {"format": ""},
        {"host": None},
        {"prefix_caching": False},
        {"load": Load()},  # it does not pull
    ],
)
def test_replicas_that_cannot_exchange_blocks_do_not(differs: dict[str, Any]) -> None:
    assert pull_at(two(**differs), "b") is None


def test_a_replica_without_a_block_server_pulls_but_is_no_peer() -> None:
    assert pull_at(two(blocks_address=""), "b") is not None
    fleet = fleet_of(peer("a", blocks_address=""), peer("b"))
    hold(fleet, "a", 100)
    assert pull_at(fleet, "b") is None


def test_the_peer_with_the_fewest_pulls_in_progress_is_chosen() -> None:
    fleet = fleet_of(*map(peer, "abcd"))
    hold(fleet, "a", 100)
    hold(fleet, "b", 100)
    first = planned(fleet, "c").peer_id
    fleet.sent(place(fleet), "c", "r", 0.0)
    assert {first, planned(fleet, "d").peer_id} == {"a", "b"}


def test_a_pull_waits_for_those_in_progress_at_both_ends() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    attempt = fleet.sent(place(fleet), "b", "r", 0.0)
    assert planned(fleet, "c").wait_s == pytest.approx(0.102)
    end(fleet, attempt)
    assert planned(fleet, "c", 1.0).wait_s == 0.0


def test_the_router_learns_how_fast_each_link_is() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.sent(place(fleet), "b", "r", 0.0), took_s=0.204)
    links = fleet.pulls.links
    assert links.slowness("a", "b") > 1.0
    assert links.slowness("a", "c") == 1.0


@pytest.mark.parametrize("reason", ["lost", "refused", "damaged"])
def test_a_peer_that_failed_is_left_out_for_a_while(reason: Reason) -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.sent(place(fleet), "b", "r", 0.0), reason)
    assert pull_at(fleet, "c", 1.0) is None
    assert pull_at(fleet, "c", 1.0 + 10 * fleet.loads.scale.busy_s) is not None


def test_a_block_that_is_gone_is_no_fault_of_the_peer() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.sent(place(fleet), "b", "r", 0.0), "gone")
    assert pull_at(fleet, "c", 1.0) is not None


def test_the_replica_is_told_whom_to_pull_from_and_for_how_long() -> None:
    fleet = two()
    there = place(fleet).candidate("b")
    order = fleet.pulls.order(there, BLOCK, PullAccess(b"key"))
    assert order is not None
    assert (order.replica_id, order.address, order.key) == ("a", "a:1", b"key")
    assert order.tokens == 100 * BLOCK
    # Computing the blocks takes 0.4 s. Nobody waits much longer than that.
    assert 0.102 < order.within_s <= 0.102 + 0.4
    assert fleet.pulls.order(there, BLOCK, None) is None
    assert fleet.pulls.order(without_pulls(there), BLOCK, PullAccess(b"key")) is None


def test_a_peer_that_has_gone_since_the_placement_is_not_asked() -> None:
    fleet = two()
    there = place(fleet).candidate("b")
    fleet.update([peer("b")])
    assert fleet.pulls.order(there, BLOCK, PullAccess(b"key")) is None


def test_pulled_blocks_are_expected_at_the_replica_that_pulls() -> None:
    fleet = two()
    fleet.sent(place(fleet), "b", "r", 0.0)
    assert fleet.caches.hits(CHAIN)["b"] == len(CHAIN)


def test_receipts_name_the_peer_and_the_price_of_the_pull() -> None:
    replicas = {each["id"]: each for each in receipt(place(two()), policy="kvroute")["replicas"]}
    assert replicas["b"]["pull_from"] == "a"
    assert replicas["b"]["pull_s"] == pytest.approx(0.112)
    assert replicas["b"]["peer_tokens"] == 100 * BLOCK
    assert replicas["b"]["terms_s"]["pull"] > 0.0
    assert replicas["a"]["pull_from"] is None
    assert replicas["a"]["terms_s"]["pull"] == 0.0


def test_pulls_are_counted_by_result() -> None:
    registry = CollectorRegistry()
    fleet = Fleet(
        model="m",
        revision="",
        block_size=BLOCK,
        rng=random.Random(0),
        observer=RouterMetrics(registry),
    )
    for id_ in "abc":
        fleet.mirror.join(id_)
    fleet.update([peer("a"), peer("b"), peer("c")])
    hold(fleet, "a", 100)
    end(fleet, fleet.sent(place(fleet), "b", "r", 0.0))
    end(fleet, fleet.sent(place(fleet), "c", "s", 0.0), "late")

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvroute_{name}_total", labels)

    assert value("pulls", result="complete") == 1
    assert value("pulls", result="late") == 1
    assert value("pulled_tokens") == 100 * BLOCK
    assert value("hit_prompt_tokens", tier="peer") == 100 * BLOCK
    assert value("peer_saved_seconds") == pytest.approx(0.4 - 0.112)


def test_receipts_do_not_mention_pulls_if_there_are_none() -> None:
    fleet = fleet_of(record("a"), record("b"))
    for each in receipt(place(fleet), policy="kvroute")["replicas"]:
        assert "pull_from" not in each
        assert "pull" not in each["terms_s"]


holdings = st.lists(st.integers(0, len(CHAIN)), min_size=2, max_size=5)


@given(holdings, st.floats(1e3, 1e9), st.floats(1, 100))
def test_a_faster_link_never_raises_a_cost(
    held: list[int], bytes_per_s: float, times: float
) -> None:
    def costs(speed: float) -> dict[str, float]:
        load = Load(pull_latency_s=0.002, pull_bytes_per_s=speed)
        fleet = fleet_of(*(peer(str(i), load) for i in range(len(held))))
        for number, blocks in enumerate(held):
            hold(fleet, str(number), blocks)
        replicas = receipt(place(fleet), policy="kvroute")["replicas"]
        return {each["id"]: each["cost_s"] for each in replicas}

    slower, faster = costs(bytes_per_s), costs(min(1e15, times * bytes_per_s))
    assert all(faster[id_] <= cost_s + 1e-9 for id_, cost_s in slower.items())


@given(holdings)
def test_a_pull_never_exceeds_what_the_peer_has(held: list[int]) -> None:
    fleet = fleet_of(*(peer(str(i)) for i in range(len(held))))
    for number, blocks in enumerate(held):
        hold(fleet, str(number), blocks)
    for candidate in place(fleet).ranking:
        own = held[int(candidate.replica_id)]
        if candidate.pull:
            assert own < candidate.pull.blocks <= held[int(candidate.pull.peer_id)]
        assert candidate.hit_blocks == (candidate.pull.blocks if candidate.pull else own)


@given(holdings, st.sampled_from(["address", "format", "speed"]))
def test_without_peers_the_ranking_is_as_without_pulls(held: list[int], missing: str) -> None:
    def ranking(*, may_pull: bool) -> list[Candidate]:
        differs: dict[str, Any] = {}
        if missing == "address" or not may_pull:
            differs = {"blocks_address": "", "format": "" if not may_pull else "f"}
        fleet = fleet_of(
            *(
                peer(
                    str(i),
                    Load() if missing == "speed" else LINK,
                    **({"format": f"f{i}"} if missing == "format" else {}) | differs,
                )
                for i in range(len(held))
            )
        )
        for number, blocks in enumerate(held):
            hold(fleet, str(number), blocks)
        return list(place(fleet).ranking)

    assert ranking(may_pull=True) == ranking(may_pull=False)


def test_the_speed_of_pulls_is_that_of_the_slowest_link_known() -> None:
    fleet = two()
    first = fleet.pulls.speeds()["b"]
    assert first.bytes_per_s == pytest.approx(1e6)
    assert first.pull_s < first.computing_s
    end(fleet, fleet.sent(place(fleet), "b", "r", 0.0), took_s=10.0)
    later = fleet.pulls.speeds()["b"]
    assert later.bytes_per_s < first.bytes_per_s
    assert later.pull_s > first.pull_s


def test_replicas_that_do_not_pull_have_no_speed_of_pulls() -> None:
    assert not fleet_of(peer("a", load=Load())).pulls.speeds()
