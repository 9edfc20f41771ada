"""The events that vLLM's process sends about its KV cache.

Only events of this package's own types are about blocks that the replica tells of; those of vLLM's
types come from a user's KV connector and are about other memory, or repeat what was told before.
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
    fingerprints: list[Fingerprint]  # of the prompt up to each block's end
    group: int


class Removed(kv_events.KVCacheEvent):
    block_hashes: list[ExternalBlockHash]
    group: int


class Held(kv_events.KVCacheEvent):
    """For each group: blocks cached under each hash, after the events before this one. With a host
    tier, the same follows of what that has."""

    copies: list[dict[ExternalBlockHash, int]]


class Moved(kv_events.KVCacheEvent):
    """Copies from host memory and to it, as in Transfers."""

    reloaded_tokens: int
    in_bytes: int
    in_s: float
    out_bytes: int
    out_s: float


class EventBatch(kv_events.EventBatch):
    """vLLM's KVEventBatch, with kvroute's events in addition to its own."""

    events: list[
        Stored
        | Removed
        | Held
        | Moved
        | kv_events.AllBlocksCleared
        | kv_events.BlockStored
        | kv_events.BlockRemoved
    ]


def event_of(event: kv_events.KVCacheEvent) -> KVEvent | None:
    """What the event says about the cache; None: nothing."""
    match event:
        case Stored():
            return BlockStored(event.block_hashes, event.fingerprints, event.group)
        case Removed():
            return BlockRemoved(event.block_hashes, event.group)
        case kv_events.AllBlocksCleared():
            return AllBlocksCleared()
        case Held():
            return BlocksHeld(event.copies)
        case Moved():
            return Transfers(
                event.reloaded_tokens, event.in_bytes, event.in_s, event.out_bytes, event.out_s
            )
        case kv_events.BlockStored() | kv_events.BlockRemoved():
            return None
        case _:
            raise TypeError(f"unknown KV event {event!r}: this vLLM is not the pinned version")
