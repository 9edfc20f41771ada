"""Requests for added adapters go to replicas that take added ones."""

import random

import numpy as np
from msgspec.structs import replace

from kvroute.blocks.chain import Scope
from kvroute.contract.identity import Identity
from kvroute.contract.records import Load
from kvroute.features.adapters.added import FEATURE, TAKES_ADDED
from kvroute.features.adapters.router_adapters import RouterAdapters
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.receipts import receipt
from tests.support.records import record

PROMPT = np.arange(100, dtype=np.uint32)
KEY = f"sql@{32 * 'a'}"


def test_an_added_adapter_goes_to_replicas_that_take_added_ones() -> None:
    feature = object.__new__(RouterAdapters)  # it needs no Redis to place prompts
    features = PlacingFeatures([feature])
    fleet = Fleet(model="m", revision="", block_size=4, rng=random.Random(0), features=features)
    identity = Identity("kvroute/1", "", 4, "", "", {"law": "1f"})
    old = replace(record("old"), identity=identity)
    taking = Load(features={FEATURE: TAKES_ADDED})
    fleet.update([old, replace(old, id="new", load=taking)])

    def placed(variant: str, *running: str) -> list[str]:
        ranking = fleet.place(PROMPT, running, 0.0, Scope(variant)).ranking
        return sorted(candidate.replica_id for candidate in ranking)

    assert placed(KEY, "old", "new") == ["new"]
    assert placed(KEY, "old") == ["old"], "a request is not refused because no replica takes it"
    assert placed(KEY, "old", "starting") == ["starting"], "a replica without a record may take it"
    assert placed("law", "old", "new") == placed("", "old", "new") == ["new", "old"]
    placement = fleet.place(PROMPT, ["old", "new"], 0.0, Scope(KEY))
    assert receipt(placement, policy="kvroute")["lora"] == "sql"
