"""The events that vLLM's process sends about its KV cache.

Only events of this package's own types are about the blocks in the engine's memory; those of vLLM's
types come from a KV connector and are about other memory, or repeat what was told before.
"""

from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import ExternalBlockHash

from kvroute.contract.fingerprint import Fingerprint
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    Evictions,
    KVEvent,
)


class Stored(kv_events.KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    fingerprints: list[Fingerprint]  # of the prompt up to each block's end
    group: int


class Removed(kv_events.KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    group: int


class Held(kv_events.KVCacheEvent):
    """For each group: blocks cached under each hash, after the events before this one."""

    copies: list[dict[ExternalBlockHash, int]]


class Evicted(kv_events.KVCacheEvent):
    """Why blocks were evicted, as in Evictions."""

    ended: int
    unlikely: int
    usual: int
    promised: int


class EventBatch(kv_events.EventBatch):
    """vLLM's KVEventBatch, with kvroute's events in addition to its own."""

    events: list[
        Stored
        | Removed
        | Held
        | Evicted
        | kv_events.AllBlocksCleared
        | kv_events.BlockStored
        | kv_events.BlockRemoved
    ]


def event_of(event: kv_events.KVCacheEvent) -> KVEvent | None:
    """What the event says about the engine's memory; None: nothing."""
    match event:
        case Stored():
            return BlockStored(event.block_hashes, event.fingerprints, event.group)
        case Removed():
            return BlockRemoved(event.block_hashes, event.group)
        case kv_events.AllBlocksCleared():
            return AllBlocksCleared()
        case Held():
            return BlocksHeld(event.copies)
        case Evicted():
            return Evictions(event.ended, event.unlikely, event.usual, event.promised)
        case kv_events.BlockStored() | kv_events.BlockRemoved():
            return None
        case _:
            raise TypeError(f"unknown KV event {event!r}: this vLLM is not the pinned version")
