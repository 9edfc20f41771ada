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
from kvroute.contract.generation import NO_TOKENS, Chunk, GenerateRequest
from kvroute.contract.records import Load, ReplicaRecord, TierFacts
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.pulls.peer_pulls import PeerPull, PlannedPulls, pull_of
from kvroute.features.pulls.router_pulls import PullMetrics
from kvroute.replica.fabric.pull import (
    Exchanging,
    LinkSpeed,
    Pull,
    PullResult,
    Reason,
    carried,
    carried_in,
)
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.placement.attempts import NO_OBSERVER, Attempt, Placement, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate
from kvroute.router.placement.receipts import receipt
from tests.support.records import record

BLOCK = 4  # tokens; a replica computes 1000 a second, so 4 ms for a block
CHAIN = [Fingerprint(1000 + i) for i in range(200)]
TIER = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e7)  # 0.1 ms for a block
LINK = LinkSpeed(0.002, 1e6)  # 1 ms for a block
NO_PULLS = LinkSpeed(0.0, 0.0)


def peer(
    replica_id: str,
    link: LinkSpeed = LINK,
    *,
    format_: str = "f",
    has_server: bool = True,
    **differs: Any,
) -> ReplicaRecord:
    """Return the record of a replica that exchanges blocks."""
    address = f"{replica_id}:1" if has_server else ""
    load = Load(features=carried(Exchanging(format_, address, *link)))
    return structs.replace(record(replica_id, **{"host": TIER} | differs), load=load)


class PullingFleet(Fleet):
    """A fleet whose replicas pull."""

    def __init__(self, *records: ReplicaRecord, observer: RequestObserver = NO_OBSERVER) -> None:
        self.pulls = PlannedPulls()
        super().__init__(
            model="m",
            revision="",
            block_size=BLOCK,
            rng=random.Random(0),
            observer=observer,
            features=PlacingFeatures([self.pulls]),
        )
        for each in records:
            self.mirror.join(each.id)
        self.update(records)

    def send(self, replica_id: str, request_id: str = "r") -> tuple[Attempt, Pull | None]:
        """Send a prompt to a replica; return what it is told to pull."""
        attempt = self.sent(place(self), replica_id, request_id, 0.0)
        request = GenerateRequest(request_id, NO_TOKENS)
        return attempt, carried_in(self.features.sending(request, attempt).features, Pull)


def fleet_of(*records: ReplicaRecord) -> PullingFleet:
    return PullingFleet(*records)


def hold(fleet: Fleet, replica_id: str, blocks: int) -> None:
    """Let a replica have leading blocks of CHAIN, in GPU memory and in host memory."""
    fleet.mirror.add(replica_id, CHAIN[:blocks])
    fleet.mirror.add(replica_id, map(HOST.fingerprint, CHAIN[:blocks]))


def place(fleet: Fleet, at_s: float = 0.0) -> Placement:
    running = [each.id for each in fleet.replicas.records]
    return fleet.place_chain(CHAIN, BLOCK * len(CHAIN) + 1, running, at_s)


def pull_at(fleet: Fleet, replica_id: str, at_s: float = 0.0) -> PeerPull | None:
    return pull_of(place(fleet, at_s).candidate(replica_id))


def planned(fleet: Fleet, replica_id: str, at_s: float = 0.0) -> PeerPull:
    pull = pull_at(fleet, replica_id, at_s)
    assert pull is not None
    return pull


def two(*, held: int = 100, **differs: Any) -> PullingFleet:
    """Return a fleet of a, which has leading blocks of CHAIN, and b, which has none."""
    fleet = fleet_of(peer("a"), peer("b", **differs))
    hold(fleet, "a", held)
    return fleet


def end(fleet: Fleet, attempt: Attempt, reason: Reason = "", *, took_s: float = 0.1) -> None:
    """Let the attempt's pull end at second 1. It copied 100 blocks, unless it failed."""
    tokens = 0 if reason else 100 * BLOCK
    result = PullResult(tokens, tokens // BLOCK * TIER.block_bytes, took_s, reason)
    attempt.receive(Chunk((1,), tokens, is_last=True, features=carried(result)), 1.0)
    attempt.end()


def test_a_replica_pulls_what_another_one_has_in_host_memory() -> None:
    there = place(two()).candidate("b")
    pull = pull_of(there)
    assert pull is not None
    assert (pull.peer_id, pull.blocks, there.hit_blocks) == ("a", 100, 100)
    assert there.reloads == (TierBlocks(PEER, 100),)
    assert there.copy_s == 0.0
    assert there.terms_wait_s == pytest.approx(0.002 + 0.1 + 0.01)


def test_a_pull_continues_after_the_replicas_own_hit() -> None:
    fleet = two()
    hold(fleet, "b", 60)
    there = place(fleet).candidate("b")
    assert there.hit_blocks == 100
    assert there.terms_wait_s == pytest.approx(0.002 + 0.04 + 0.004)


def test_the_replica_with_the_blocks_pulls_nothing() -> None:
    assert pull_at(two(), "a") is None


def test_blocks_in_gpu_memory_alone_cannot_be_pulled() -> None:
    fleet = fleet_of(peer("a"), peer("b"))
    fleet.mirror.add("a", CHAIN[:100])
    assert pull_at(fleet, "b") is None


def test_a_link_that_is_slower_than_computing_is_not_used() -> None:
    assert pull_at(two(link=LinkSpeed(0.002, 1e4)), "b") is None


@pytest.mark.parametrize(
    "differs",
    [
        {"format_": "other"},
        {"host": None},
        {"prefix_caching": False},
        {"link": NO_PULLS},
    ],
)
def test_replicas_that_cannot_exchange_blocks_do_not(differs: dict[str, Any]) -> None:
    assert pull_at(two(**differs), "b") is None


def test_a_replica_without_a_block_server_pulls_but_is_no_peer() -> None:
    assert pull_at(two(has_server=False), "b") is not None
    fleet = fleet_of(peer("a", has_server=False), peer("b"))
    hold(fleet, "a", 100)
    assert pull_at(fleet, "b") is None


def test_the_peer_with_the_fewest_pulls_in_progress_is_chosen() -> None:
    fleet = fleet_of(*map(peer, "abcd"))
    hold(fleet, "a", 100)
    hold(fleet, "b", 100)
    first = planned(fleet, "c").peer_id
    fleet.send("c")
    assert {first, planned(fleet, "d").peer_id} == {"a", "b"}


def test_a_pull_waits_for_those_in_progress_at_both_ends() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    attempt, _ = fleet.send("b")
    assert planned(fleet, "c").wait_s == pytest.approx(0.102)
    end(fleet, attempt)
    assert planned(fleet, "c", 1.0).wait_s == 0.0


def test_the_router_learns_how_fast_each_link_is() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.send("b")[0], took_s=0.204)
    links = fleet.pulls.links
    assert links.slowness("a", "b") > 1.0
    assert links.slowness("a", "c") == 1.0


@pytest.mark.parametrize("reason", ["lost", "refused", "damaged"])
def test_a_peer_that_failed_is_left_out_for_a_while(reason: Reason) -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.send("b")[0], reason)
    assert pull_at(fleet, "c", 1.0) is None
    assert pull_at(fleet, "c", 1.0 + 10 * fleet.loads.scale.busy_s) is not None


def test_a_block_that_is_gone_is_no_fault_of_the_peer() -> None:
    fleet = fleet_of(*map(peer, "abc"))
    hold(fleet, "a", 100)
    end(fleet, fleet.send("b")[0], "gone")
    assert pull_at(fleet, "c", 1.0) is not None


def test_the_replica_is_told_whom_to_pull_from_and_for_how_long() -> None:
    fleet = two()
    _, order = fleet.send("b")
    assert order is not None
    assert (order.replica_id, order.address, order.tokens) == ("a", "a:1", 100 * BLOCK)
    # Computing the blocks takes 0.4 s. Nobody waits much longer than that.
    assert 0.102 < order.within_s <= 0.102 + 0.4
    assert fleet.send("a", "without")[1] is None


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_peer_that_cannot_be_reached_any_more_is_not_asked(is_gone: bool) -> None:
    fleet = two()
    attempt = fleet.sent(place(fleet), "b", "r", 0.0)
    if is_gone:
        fleet.update([peer("b")])
    else:
        fleet.pulls.access = lambda rank_id: None  # type: ignore[method-assign]
    assert fleet.features.sending(GenerateRequest("r", NO_TOKENS), attempt).features == {}


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
    fleet = PullingFleet(*map(peer, "abc"), observer=RouterMetrics(registry))
    fleet.pulls.count = PullMetrics(registry).count  # type: ignore[method-assign]
    hold(fleet, "a", 100)
    end(fleet, fleet.send("b")[0])
    end(fleet, fleet.send("c", "s")[0], "late")

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
        link = LinkSpeed(0.002, speed)
        fleet = fleet_of(*(peer(str(i), link) for i in range(len(held))))
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
        if pull := pull_of(candidate):
            assert own < pull.blocks <= held[int(pull.peer_id)]
        assert candidate.hit_blocks == (pull.blocks if pull else own)


@given(holdings, st.sampled_from(["address", "format", "speed"]))
def test_without_peers_the_ranking_is_as_without_pulls(held: list[int], missing: str) -> None:
    def ranking(*, may_pull: bool) -> list[Candidate]:
        fleet = fleet_of(
            *(
                peer(
                    str(i),
                    NO_PULLS if missing == "speed" or not may_pull else LINK,
                    format_=f"f{i}" if missing == "format" else "f",
                    has_server=may_pull and missing != "address",
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
    end(fleet, fleet.send("b")[0], took_s=10.0)
    later = fleet.pulls.speeds()["b"]
    assert later.bytes_per_s < first.bytes_per_s
    assert later.pull_s > first.pull_s


def test_replicas_that_do_not_pull_have_no_speed_of_pulls() -> None:
    assert not fleet_of(peer("a", NO_PULLS)).pulls.speeds()
