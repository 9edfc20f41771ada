"""What a replica reports about pulls, and how long it stays when it is removed."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs

from kvroute.contract.records import Load
from kvroute.features.pulls.peer_pulls import PlannedPulls
from kvroute.features.pulls.pull_options import PullOptions
from kvroute.features.pulls.replica_pulls import ReplicaPulls
from kvroute.features.replica_feature import ReplicaFeatures
from kvroute.replica.fabric.pull import FEATURE, Exchanging, decode_exchanging
from tests.features.pulls.test_peer_pulls import fleet_of, peer


def replica(*exchanging: Exchanging) -> ReplicaFeatures:
    """Return the features of a replica whose ranks exchange blocks like this."""
    engines = [SimpleNamespace(exchanging=lambda e=e: e, pull=print) for e in exchanging]
    base: Any = SimpleNamespace(ranks=[SimpleNamespace(engine=engine) for engine in engines])
    return ReplicaFeatures([ReplicaPulls(base, PullOptions(hand_over_s=20.0))])


def test_each_rank_reports_how_it_exchanges_blocks() -> None:
    first, second = Exchanging("f", "a:1", 0.1, 1e9), Exchanging("f", "a:2", 0.2, 2e9)
    features = replica(first, second)
    reported = [features.reports(rank)[FEATURE] for rank in (0, 1)]
    assert [*map(decode_exchanging, reported)] == [first, second]
    assert replica(Exchanging()).reports(0) == {}, "an engine that exchanges no blocks"


@pytest.mark.parametrize(("address", "stays_s"), [("a:1", 20.0), ("", 0.0)])
def test_only_a_removed_replica_with_blocks_to_pull_stays(address: str, stays_s: float) -> None:
    assert replica(Exchanging(), Exchanging("f", address)).stays_s() == stays_s


def test_a_replica_whose_report_cannot_be_read_takes_part_in_no_pull() -> None:
    damaged = structs.replace(peer("b"), load=Load(features={FEATURE: b"\xc1"}))
    pulls: PlannedPulls = fleet_of(peer("a"), damaged).pulls
    assert [*pulls.exchanges] == ["a"]
