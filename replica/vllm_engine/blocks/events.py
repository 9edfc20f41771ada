"""The events that vLLM's process sends about its KV cache.

The replica publishes only the blocks in events of this module's own types. Events of vLLM's types
come from a user's KV connector. They are about other memory, or they repeat earlier events.
"""

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


class Stored(kv_events.KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    fingerprints: list[Fingerprint]  # for each block: fingerprint of the prompt up to its end
    group: int


class Removed(kv_events.KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    group: int


class CachedBlocks(kv_events.KVCacheEvent):
    """All cached blocks, after the events before this one."""

    # For each group, the number of cached blocks under each hash. With a host tier, the groups in
    # host memory follow.
    copies: list[dict[ExternalBlockHash, int]]


class Moved(kv_events.KVCacheEvent):
    """Copies from and to host memory, as in kv_events.Transfers."""

    reloaded_tokens: int
    in_bytes: int
    in_s: float
    out_bytes: int
    out_s: float


class EventBatch(kv_events.EventBatch):
    """vLLM's KVEventBatch, with kvroute's types of events in addition to vLLM's types."""

    events: list[
        Stored
        | Removed
        | CachedBlocks
        | Moved
        | kv_events.AllBlocksCleared
        | kv_events.BlockStored
        | kv_events.BlockRemoved
    ]


def event_of(event: kv_events.KVCacheEvent) -> KVEvent | None:
    """Return the engine event for an event of vLLM's process; None if it is to be ignored."""
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
            return Transfers(
                event.reloaded_tokens, event.in_bytes, event.in_s, event.out_bytes, event.out_s
            )
        case kv_events.BlockStored() | kv_events.BlockRemoved():
            return None
        case _:
            raise TypeError(f"unknown KV event {event!r}: this vLLM is not the pinned version")
