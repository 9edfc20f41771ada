"""How many replicas keep a prefix warm follows the demand for it."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from kvroute.contract.records import ReplicaRecord
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.demand import Demand, Second, extra_replicas
from kvroute.store.connection import connect
from kvroute.store.prefixes import Prefix, Prefixes, assigned
from tests.support.records import FACTS, LOAD

CROWDED = Second(requests=5, backlog_s=2.0, busy=1.0)
BUSY = Second(requests=5, backlog_s=0.5, busy=1.0)
EASY = Second(requests=5, backlog_s=0.0, busy=0.3)
UNUSED = Second(requests=0, backlog_s=9.0, busy=1.0)


def wanted(seconds: Sequence[Second], extra: int = 1, *, warm: int = 3, others: int = 2) -> int:
    return extra_replicas(extra, seconds, prefix_s=1.0, warm=warm, others=others)


@pytest.mark.parametrize(
    ("seconds", "change"),
    [
        ([], 0),
        ([CROWDED] * 7, 0),
        ([CROWDED] * 8, 1),
        ([CROWDED, EASY] * 5, 0),
        ([EASY] * 50 + [CROWDED] * 8, 1),
        ([CROWDED] * 20 + [BUSY] * 3, 0),
        ([UNUSED] * 20, 0),
        ([BUSY] * 60, 0),
        ([EASY] * 59, 0),
        ([EASY] * 60, -1),
        ([UNUSED] * 60, -1),
        ([UNUSED] * 59 + [BUSY], 0),
    ],
)
def test_one_more_when_crowded_for_seconds_one_less_after_an_easy_minute(
    seconds: list[Second], change: int
) -> None:
    assert wanted(seconds) == 1 + change


def test_there_are_no_more_replicas_than_there_are() -> None:
    assert wanted([CROWDED] * 10, others=0) == 1


def test_those_that_were_asked_for_stay() -> None:
    assert wanted([UNUSED] * 60, extra=0) == 0


def test_what_one_less_could_not_serve_is_not_taken_away() -> None:
    """Two replicas busy for a third of the time are one that is busy for two thirds."""
    third = Second(requests=5, backlog_s=0.0, busy=1 / 3)
    assert wanted([third] * 60, warm=2) == 1
    assert wanted([third] * 60, warm=3) == 0


class Scene:
    """One router, four replicas, one prefix that one of them keeps warm."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.fleet = Fleet(model="m", revision="", block_size=4, rng=random.Random(1))
        self.fleet.update(ReplicaRecord(id_, "i", 0, FACTS, LOAD) for id_ in "abcd")
        store = Prefixes(connect("redis://127.0.0.1:1"), "m")
        self.catalogue = Catalogue(store, self.fleet, block_size=4)
        self.demand = Demand(self.catalogue, self.fleet, clock=lambda: self.now_s)
        self.set_extra(0)

    def set_extra(self, extra: int) -> None:
        ids = np.arange(1000, dtype=np.uint32)  # a second of prefill
        self.prefix = Prefix("law", 1, ids, {"prompt": "?"}, 1, extra_replicas=extra)
        self.catalogue.learn([self.prefix])

    def queue(self, replica_id: str) -> None:
        """Three seconds of prefill are sent there."""
        placement = self.fleet.place(np.arange(3000, dtype=np.uint32), "abcd", self.now_s)
        self.fleet.sent(placement, replica_id, f"{replica_id} {self.now_s}", self.now_s)

    def seconds(self, count: int) -> list[int]:
        """What is proposed in so many seconds with a request each."""
        proposed = []
        for _ in range(count):
            self.now_s += 1.0
            self.demand.count(self.prefix)
            proposed += [extra for _, extra in self.demand.check()]
        return proposed


def test_a_crowded_replica_gets_help_and_watching_starts_anew() -> None:
    scene = Scene()
    for _ in range(10):
        scene.queue(assigned(scene.prefix, "abcd")[0])
    assert scene.seconds(8) == [1]
    scene.set_extra(1)
    assert scene.seconds(20) == []


def test_a_crowd_elsewhere_is_no_reason() -> None:
    scene = Scene()
    (warm,) = assigned(scene.prefix, "abcd")
    for replica_id in set("abcd") - {warm}:
        scene.queue(replica_id)
    assert scene.seconds(20) == []
