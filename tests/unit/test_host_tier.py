"""Placement of prompts that replicas have in host memory, and the figures about it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry

from kvroute.blocks.cache_groups import CacheGroup, Layout
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST
from kvroute.contract.generation import Chunk
from kvroute.contract.records import (
    Description,
    Load,
    ReplicaRecord,
    TierFacts,
    encode,
)
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.placement.attempts import (
    NO_OBSERVER,
    Attempt,
    Placement,
    RequestContext,
    RequestObserver,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.policy import Candidate
from tests.support.records import FACTS, facts, record

BLOCK = 4  # tokens; a replica computes 1000 a second
CHAIN = [Fingerprint(1000 + i) for i in range(200)]
TOKENS = BLOCK * len(CHAIN) + 1
TIER = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e6)  # 1 ms for a block: 4 times faster


def with_tier(replica_id: str, **differs: Any) -> ReplicaRecord:
    return record(replica_id, **{"host": TIER} | differs)


def fleet_of(*records: ReplicaRecord, observer: RequestObserver = NO_OBSERVER) -> Fleet:
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0), observer=observer)
    for each in records:
        fleet.mirror.join(each.id)
    fleet.update(records)
    return fleet


def hold(fleet: Fleet, replica_id: str, *, gpu: int = 0, host: int = 0) -> None:
    fleet.mirror.add(replica_id, CHAIN[:gpu])
    fleet.mirror.add(replica_id, map(HOST.fingerprint, CHAIN[:host]))


def place(fleet: Fleet, at_s: float = 0.0, chain: Sequence[Fingerprint] = CHAIN) -> Placement:
    running = [each.id for each in fleet.replicas.records]
    return fleet.place_chain(chain, BLOCK * len(chain) + 1, running, at_s)


def at(fleet: Fleet, replica_id: str, at_s: float = 0.0) -> Candidate:
    return place(fleet, at_s).candidate(replica_id)


def reloaded(candidate: Candidate) -> int:
    return candidate.hit_blocks - candidate.gpu_blocks


def answer(attempt: Attempt, *, at_s: float, cached_blocks: int = len(CHAIN)) -> Attempt:
    attempt.receive(Chunk((1,), cached_blocks * BLOCK, is_last=True), at_s)
    attempt.end()
    return attempt


def show_speed(fleet: Fleet, *, bytes_per_s: float) -> None:
    """Report the recent speed of copies on replica a."""
    load = Load(host_bytes_per_s=bytes_per_s)
    fleet.update(
        [
            structs.replace(each, load=load) if each.id == "a" else each
            for each in fleet.replicas.records
        ]
    )


def test_a_record_without_slower_tiers_has_no_field_for_them() -> None:
    assert encode(Description(FACTS)) == (
        b'{"facts":{"block_size":4,"capacity_blocks":100,"max_model_len":4096,'
        b'"prefill_tokens_per_s":1000.0,"attention_tokens":1000000000.0,'
        b'"max_cpu_loras":1073741824},"identity":null,'
        b'"whereabouts":{"node":"","pid":0,"metrics":null},"model":"","version":1}'
    )
    assert encode(Load(running=1)) == b'{"running":1}'
    assert b"host" in encode(Description(facts(host=TIER)))


def test_a_hit_starts_in_gpu_memory_and_continues_in_host_memory() -> None:
    fleet = fleet_of(with_tier("a"), record("b"))
    hold(fleet, "a", gpu=50, host=150)
    there = at(fleet, "a")
    assert (there.hit_blocks, reloaded(there)) == (150, 100)
    assert there.reload_s == pytest.approx(0.1)
    assert there.own_s == pytest.approx(0.201)
    assert place(fleet).predicted_ttft_s("a") == pytest.approx(0.301)


def test_blocks_in_both_tiers_count_once_and_need_no_reload() -> None:
    fleet = fleet_of(with_tier("a"))
    hold(fleet, "a", gpu=150, host=120)
    there = at(fleet, "a")
    assert (there.hit_blocks, reloaded(there), there.reload_s) == (150, 0, 0.0)


def test_a_prefix_in_gpu_memory_is_preferred_to_host_memory_and_that_to_computing() -> None:
    fleet = fleet_of(with_tier("host"), with_tier("gpu"), with_tier("cold"))
    hold(fleet, "host", host=200)
    hold(fleet, "gpu", gpu=200)
    assert [each.replica_id for each in place(fleet).ranking] == ["gpu", "host", "cold"]


def test_a_host_hit_on_an_idle_replica_is_worth_more_than_a_wait_for_the_gpus() -> None:
    fleet = fleet_of(with_tier("host"), with_tier("gpu"))
    hold(fleet, "host", host=200)
    hold(fleet, "gpu", gpu=200)
    fleet.sent(place(fleet, 0.0, CHAIN[:1]), "gpu", "other", 0.0)
    other = [Fingerprint(i) for i in range(1, 100)]
    fleet.sent(place(fleet, 0.0, other), "gpu", "long", 0.0)
    assert place(fleet).ranking[0].replica_id == "host"


def test_host_memory_is_ignored_if_reloading_is_slower_than_computing() -> None:
    slow = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e5)  # 10 ms for a block of 4 ms
    fleet = fleet_of(with_tier("a", host=slow), record("b"))
    hold(fleet, "a", gpu=50, host=200)
    placement = place(fleet)
    assert (placement.best_hit_blocks, reloaded(placement.candidate("a"))) == (50, 0)
    assert placement.candidate("a").reload_s == 0.0
    assert not fleet.sent(placement, "a", "r", 0.0).dispatch.loads_first


def test_a_replica_without_a_tier_or_a_record_or_that_differs_has_no_host_hits() -> None:
    fleet = fleet_of(record("plain"), with_tier("away"), with_tier("odd", layout=UNKNOWN))
    for replica_id in ("plain", "away", "odd"):
        hold(fleet, replica_id, host=200)
    assert place(fleet).best_hit_blocks == 200
    fleet.update([record("plain"), with_tier("odd", layout=UNKNOWN)])
    assert fleet.place_chain(CHAIN, TOKENS, ["plain", "away", "odd"], 0.0).best_hit_blocks == 0


UNKNOWN = Layout((CacheGroup("telepathy", 8),), 8)


def test_the_cost_of_a_host_hit_follows_the_measured_copy_speed() -> None:
    """The replica reports 1 ms per block; computing a block takes 4 ms."""
    fleet = fleet_of(with_tier("a"), record("b"))
    hold(fleet, "a", host=200)
    fleet.mirror.add("b", CHAIN[:60])
    assert place(fleet).ranking[0].replica_id == "a"
    assert at(fleet, "a").reload_s == pytest.approx(0.2)
    show_speed(fleet, bytes_per_s=1e5)
    assert reloaded(at(fleet, "a")) == 0
    assert place(fleet).ranking[0].replica_id == "b"
    show_speed(fleet, bytes_per_s=1e7)
    assert at(fleet, "a").reload_s == pytest.approx(0.02)
    assert place(fleet).ranking[0].replica_id == "a"


def test_a_busy_replica_is_not_idle_while_its_next_prompt_is_copied() -> None:
    fleet = fleet_of(with_tier("a", host=TierFacts(1000, 1000, 3e5)))
    hold(fleet, "a", host=200)
    chain = [*CHAIN, *(Fingerprint(i) for i in range(200))]
    attempt = fleet.sent(place(fleet, 0.0, chain), "a", "r", 0.0)
    computed_s = attempt.dispatch.prefill_s
    for now_s in (0.0, 0.6):
        assert fleet.loads.backlogs_s(["a"], now_s) == [pytest.approx(computed_s)]
    assert fleet.loads.backlogs_s(["a"], 2 / 3 + 0.1) == [pytest.approx(computed_s - 0.1)]


def test_a_prompt_waits_for_blocks_that_are_being_copied_for_another() -> None:
    fleet = fleet_of(with_tier("a"), with_tier("b"))
    hold(fleet, "a", gpu=50, host=200)
    fleet.sent(place(fleet), "a", "leader", 0.0)
    follower = at(fleet, "a", 0.05)
    assert (follower.hit_blocks, reloaded(follower)) == (200, 0)
    assert follower.reload_s == pytest.approx(0.1)
    fleet.mirror.add("a", CHAIN)
    assert at(fleet, "a", 0.05).reload_s == 0.0


def test_the_prefill_speed_is_not_learned_from_a_request_with_a_reload() -> None:
    publisher = PeerPublisher()
    fleet, peer = fleet_of(with_tier("a"), observer=publisher), fleet_of(with_tier("a"))
    subscriber = PeerSubscriber(peer, own="peer", clock=lambda: 5.0)
    hold(fleet, "a", host=200)
    attempt = fleet.sent(place(fleet), "a", "r", 0.0)
    assert attempt.dispatch.loads_first
    answer(attempt, at_s=50.0)
    subscriber.receive(publisher.next_message())
    assert attempt.load.speed.slowness == peer.loads.of("a").speed.slowness == 1.0


def test_a_prompt_computed_during_a_reload_is_timed_from_its_own_start() -> None:
    fleet = fleet_of(with_tier("a"))
    hold(fleet, "a", host=200)
    fleet.sent(place(fleet), "a", "reloads", 0.0)
    chain = [Fingerprint(i) for i in range(100)]
    other = fleet.sent(place(fleet, 50.0, chain), "a", "computes", 50.0)
    answer(other, at_s=50.401, cached_blocks=0)
    assert other.load.speed.slowness == pytest.approx(1.0)


def test_a_prompt_is_reloaded_even_if_many_copies_are_pending() -> None:
    """Waiting for copies delays one request; computing would delay all later ones, too."""
    fleet = fleet_of(with_tier("a"))
    chains = [[Fingerprint(1000 * n + i) for i in range(200)] for n in range(1, 7)]
    for chain in chains:
        fleet.mirror.add("a", map(HOST.fingerprint, chain))
    for number, chain in enumerate(chains[:-1]):
        fleet.sent(place(fleet, 0.0, chain), "a", str(number), 0.0)
    last = place(fleet, 0.0, chains[-1]).candidate("a")
    assert reloaded(last) == 200
    assert last.reload_s == pytest.approx(1.2)  # computing the blocks takes 0.8 s


def test_reloads_are_pending_until_their_first_tokens() -> None:
    fleet = fleet_of(with_tier("a"))
    hold(fleet, "a", host=200)
    first = fleet.sent(place(fleet), "a", "first", 0.0)
    fleet.mirror.unexpect("a", first.dispatch.expected.blocks)  # as for another prompt
    assert at(fleet, "a", 0.05).reload_s == pytest.approx(0.15 + 0.2)
    first.load.finish("first")
    assert at(fleet, "a", 0.05).reload_s == pytest.approx(0.2)


def test_a_block_evicted_from_gpu_memory_only_is_still_a_hit() -> None:
    fleet = fleet_of(with_tier("a"))
    hold(fleet, "a", gpu=200, host=200)
    fleet.mirror.remove("a", CHAIN[50:])
    assert place(fleet).evicted_tokens == 0
    fleet.mirror.remove("a", map(HOST.fingerprint, CHAIN[120:]))
    assert place(fleet).evicted_tokens == 80 * BLOCK


def test_blocks_in_host_memory_cause_no_cache_pressure() -> None:
    def pressure(evicted: Sequence[Fingerprint]) -> float:
        fleet = fleet_of(with_tier("a"))
        for number in range(20):
            hold(fleet, "a", gpu=200, host=200)
            fleet.mirror.remove("a", evicted)
            placement = place(fleet, float(number))
            context = fleet.recognise(placement, RequestContext(0.0))
            fleet.sent(placement, "a", str(number), float(number), context).end()
        return place(fleet).pressure

    assert pressure(CHAIN) == 0.0
    assert pressure([*CHAIN, *map(HOST.fingerprint, CHAIN)]) > 0.0


def test_engines_with_several_cache_groups_reload_too() -> None:
    layout = Layout((CacheGroup("full_attention", 4), CacheGroup("mamba", 16)), 16)
    fleet = fleet_of(with_tier("a", layout=layout), with_tier("plain"))
    members = fleet.caches.added("a", CHAIN)
    fleet.mirror.add("a", members[:60])
    fleet.mirror.add("a", map(HOST.fingerprint, members))
    there = at(fleet, "a")
    assert (there.hit_blocks, reloaded(there)) == (200, 200)  # the state is in host memory only
    assert at(fleet, "plain").hit_blocks == 0


def test_the_state_of_the_fleet_has_the_tiers_size_and_its_speed() -> None:
    fleet = fleet_of(with_tier("a", host=TierFacts(1000, 10**6, 1e9)), record("b"))
    assert fleet.replicas.tiers_as_json("a") == {"host": {"blocks": 1000, "gb_per_s": 1.0}}
    show_speed(fleet, bytes_per_s=5e8)
    assert fleet.replicas.tiers_as_json("a") == {"host": {"blocks": 1000, "gb_per_s": 0.5}}
    assert fleet.replicas.tiers_as_json("b") == {}


def test_hits_are_counted_by_tier() -> None:
    registry = CollectorRegistry()
    fleet = fleet_of(with_tier("a"), observer=RouterMetrics(registry))
    hold(fleet, "a", gpu=50, host=150)
    answer(fleet.sent(place(fleet), "a", "r", 0.0), at_s=1.0, cached_blocks=140)
    found = {
        tier: registry.get_sample_value("kvroute_hit_prompt_tokens_total", {"tier": tier})
        for tier in ("gpu", "host")
    }
    assert found == {"gpu": 200, "host": 360}
    saved_s = registry.get_sample_value("kvroute_host_saved_seconds_total")
    assert saved_s == pytest.approx(0.36 - 0.1, rel=0.01)  # 360 tokens; 100 blocks are copied
