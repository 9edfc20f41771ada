"""Records of replicas for tests."""

from typing import Any

import msgspec

from kvroute.contract.records import Description, EngineFacts, Load, ReplicaRecord
from kvroute.router.placement.load import UNLIMITED

FACTS = EngineFacts(
    block_size=4,
    capacity_blocks=100,
    max_model_len=4096,
    prefill_tokens_per_s=1000.0,
    attention_tokens=1e9,  # practically no attention, so that prefill times are easy to compute
    max_variants=UNLIMITED,
)
LOAD = Load()
DESCRIPTION = Description(FACTS)


def facts(**differs: Any) -> EngineFacts:
    return msgspec.structs.replace(FACTS, **differs)


def record(replica_id: str, *, load: Load = LOAD, **differs: Any) -> ReplicaRecord:
    """Return the record of a replica whose facts differ from FACTS in these fields."""
    return ReplicaRecord(replica_id, "1", 0, facts(**differs), load)


NO_DRIFT = {"replica": 0, "redis": 0, "mirror": 0}  # result of an audit without differences
