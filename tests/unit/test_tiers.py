"""Several slower tiers behind GPU memory. The router works with any tiers."""

import random

import pytest

from kvroute.blocks.cache_groups import group_fingerprint
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, GPU, GROUPS, HOST, TIERS, TierBlocks, up_to
from kvroute.contract.generation import Chunk
from kvroute.contract.records import TierFacts
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.receipts import receipt
from tests.support.records import record

BLOCK = 4  # tokens per block; a replica computes 1000 tokens per second
CHAIN = [Fingerprint(1000 + i) for i in range(200)]
FAST = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e6)  # 1 ms for a block, 4 to compute
SLOW = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=5e5)  # 2 ms for a block
SLOWEST = TierFacts(blocks=1000, block_bytes=1000, bytes_per_s=1e5)  # 10 ms for a block


def fleet_with(disk: TierFacts) -> Fleet:
    """Return a fleet whose replica a holds a part of CHAIN in each of three tiers."""
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
    for replica_id in ("a", "b"):
        fleet.mirror.join(replica_id)
    fleet.update([record("a"), record("b")])
    fleet.replicas.tiers = {"a": {HOST: FAST, DISK: disk}}
    fleet.caches.update()
    fleet.mirror.add("a", CHAIN[:50])
    fleet.mirror.add("a", map(HOST.fingerprint, CHAIN[:120]))
    fleet.mirror.add("a", map(DISK.fingerprint, CHAIN[100:]))
    return fleet


def place(fleet: Fleet) -> Placement:
    return fleet.place_chain(CHAIN, BLOCK * len(CHAIN) + 1, ["a", "b"], 0.0)


def test_a_hit_continues_in_each_slower_tier() -> None:
    there = place(fleet_with(SLOW)).candidate("a")
    assert there.hit_blocks == 200
    assert there.reloads == (TierBlocks(HOST, 70), TierBlocks(DISK, 80))
    assert there.gpu_blocks == 50
    assert there.reload_s == pytest.approx(0.07 + 0.16)


def test_a_tier_that_is_slower_than_computing_ends_the_hit() -> None:
    there = place(fleet_with(SLOWEST)).candidate("a")
    assert (there.hit_blocks, there.reloads) == (120, (TierBlocks(HOST, 70),))


def test_the_tokens_of_an_answer_are_counted_by_tier() -> None:
    fleet = fleet_with(SLOW)
    attempt = fleet.sent(place(fleet), "a", "r", 0.0)
    attempt.receive(Chunk((1,), 150 * BLOCK, is_last=True), 1.0)
    assert attempt.reloaded_tokens == {HOST: 70 * BLOCK, DISK: 30 * BLOCK}
    assert all(saved_s > 0 for saved_s in attempt.saved_s.values())


def test_a_receipt_has_the_tokens_of_each_tier() -> None:
    there, other = receipt(place(fleet_with(SLOW)), policy="kvroute")["replicas"]
    assert (there["host_tokens"], there["disk_tokens"]) == (70 * BLOCK, 80 * BLOCK)
    assert (other["host_tokens"], other["disk_tokens"], other["reload_s"]) == (0, 0, 0.0)


def test_a_block_is_evicted_when_its_last_copy_is_removed() -> None:
    mirror = Mirror()
    mirror.join("a")
    mirror.set_tiers({"a": (HOST, DISK)})
    block = CHAIN[0]
    copies = [tier.fingerprint(block) for tier in (GPU, HOST, DISK)]
    mirror.add("a", copies)
    for copy in copies:
        mirror.remove("a", [copy])
    assert mirror.is_known(block)
    assert not mirror.hits([block], tiers=(HOST, DISK))
    mirror.drop("a")
    while mirror.sweep():
        pass
    assert len(mirror) == 0


def test_tiers_have_their_own_fingerprints_and_groups() -> None:
    block = CHAIN[0]
    assert len(
        {group_fingerprint(block, GROUPS * t.number + g) for t in TIERS for g in range(GROUPS)}
    ) == GROUPS * len(TIERS)
    assert HOST.fingerprint(HOST.fingerprint(block)) == block == GPU.fingerprint(block)
    assert (list(up_to(GPU)), list(up_to(HOST))) == ([], [HOST])
