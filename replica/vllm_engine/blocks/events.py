"""The events about the KV cache that vLLM's process sends to the replica.

The replica publishes only the blocks in this module's events, because only these events contain
fingerprints. vLLM's own BlockStored and BlockRemoved are ignored: they come from a KV connector
that the user configured, and are about other memory or repeat earlier events.
"""

import msgspec
from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    KVEvent,
    Transfers,
)
from kvroute.replica.fabric.pull import PullResult


class Stored(kv_events.KVCacheEvent):
    """vLLM's message for a BlockStored event (engine/kv_events.py): blocks were cached."""

    block_hashes: list[ExternalBlockHash]
    fingerprints: list[Fingerprint]  # for each block, the fingerprint of the prompt up to its end
    group: int


class Removed(kv_events.KVCacheEvent):
    """vLLM's message for a BlockRemoved event (engine/kv_events.py): blocks were evicted."""

    block_hashes: list[ExternalBlockHash]
    group: int


class CachedBlocks(kv_events.KVCacheEvent):
    """vLLM's message for a BlocksHeld event (engine/kv_events.py): a list of all cached blocks."""

    # For each group, the number of cached blocks under each hash. With a host tier, the groups in
    # host memory follow.
    copies: list[dict[ExternalBlockHash, int]]


class Moved(kv_events.KVCacheEvent):
    """vLLM's message for a Transfers event (engine/kv_events.py): copies from and to host memory.

    The fields have the same meaning there.
    """

    reloaded_tokens: int
    in_bytes: int
    in_s: float
    out_bytes: int
    out_s: float
    disk_in_bytes: int = 0
    disk_in_s: float = 0.0
    disk_out_bytes: int = 0
    disk_failures: int = 0


class Pulled(kv_events.KVCacheEvent):
    """vLLM's message for the result of a request's pull (fabric/pull.py)."""

    request_id: str  # id of the GenerateRequest
    result: PullResult


class EventBatch(kv_events.EventBatch):
    """vLLM's KVEventBatch, which can also contain the events of this module."""

    events: list[
        Stored
        | Removed
        | CachedBlocks
        | Moved
        | Pulled
        | kv_events.AllBlocksCleared
        | kv_events.BlockStored
        | kv_events.BlockRemoved
    ]


def event_of(event: kv_events.KVCacheEvent) -> KVEvent | None:
    """Convert an event of vLLM's process to an engine event; None if it is ignored."""
    match event:
        case Stored():
            return BlockStored(event.block_hashes, event.fingerprints, event.group)
        case Removed():
            return BlockRemoved(event.block_hashes, event.group)
        case kv_events.AllBlocksCleared():
            return AllBlocksCleared()
        case CachedBlocks():
            return BlocksHeld(event.copies)
        case Moved():
            return Transfers(**msgspec.structs.asdict(event))
        case Pulled() | kv_events.BlockStored() | kv_events.BlockRemoved():
            return None
        case _:
            raise TypeError(
                f"this version of vLLM sends the unknown KV event {event!r}; run `make setup` to "
                "install a supported version"
            )
