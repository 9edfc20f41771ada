"""What a replica says of itself in the index, as far as tests care."""

from typing import Any

import msgspec

from kvroute.contract.records import Description, EngineFacts, Load, Pins, ReplicaRecord
from kvroute.router.placement.load import UNLIMITED

FACTS = EngineFacts(
    block_size=4,
    capacity_blocks=100,
    max_model_len=4096,
    prefill_tokens_per_s=1000.0,
    attention_tokens=1e9,  # as good as no attention: seconds are easy to tell
    max_cpu_loras=UNLIMITED,
)
LOAD = Load()
DESCRIPTION = Description(FACTS)


def facts(**differs: Any) -> EngineFacts:
    return msgspec.structs.replace(FACTS, **differs)


def record(replica_id: str, *, pins: Pins | None = None, **differs: Any) -> ReplicaRecord:
    """differs: in its facts."""
    return ReplicaRecord(replica_id, "1", 0, facts(**differs), LOAD, pins or {})


NO_DRIFT = {"replica": 0, "redis": 0, "mirror": 0}  # an audit that found nothing wrong
