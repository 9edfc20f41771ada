"""What a router knows of its replicas while they are replaced."""

import random

import msgspec
import pytest

from kvroute.contract.records import ReplicaRecord
from kvroute.router.index.handshake import Handshake
from kvroute.router.placement.fleet import Fleet
from tests.support.records import FACTS, LOAD


def record(replica_id: str, content_format: str = "string") -> ReplicaRecord:
    facts = msgspec.structs.replace(FACTS, content_format=content_format, max_model_len=4096)
    return ReplicaRecord(replica_id, "1", 0, facts, LOAD)


@pytest.mark.parametrize("records", [[], [record("new")], [record("other")]])
def test_the_format_of_chats_stays_known_when_all_replicas_are_replaced(
    records: list[ReplicaRecord],
) -> None:
    running = ["old"]
    fleet = Fleet(
        model="m",
        revision="",
        block_size=4,
        rng=random.Random(0),
        handshake=Handshake(None),
        running=lambda: running,
        step_s=0.0,
    )
    assert fleet.replicas.content_format is None
    assert fleet.replicas.max_model_len is None
    fleet.update([record("old")])
    running[:] = ["new"]  # it runs, and its record is read some time later
    fleet.update(records)
    assert fleet.replicas.content_format == "string"
    assert fleet.replicas.max_model_len == 4096
