"""The KV cache events of a vLLM server, as its ZMQ publisher encodes them.

Only the fields that kvroute reads are declared. Fields that later versions of vLLM add are ignored.
Kinds of events that they add are skipped and counted.
"""

from collections import Counter
from typing import Any

import msgspec
from msgspec import Raw, Struct

from kvroute.replica.engine.kv_events import BlockHash


class StoredEvent(Struct, tag="BlockStored", gc=False):
    """Blocks that were added to the cache, in the order of their prompt."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None  # the block before the first one; None: a prompt's start
    token_ids: list[int]  # the tokens of all blocks together
    block_size: int
    medium: str | None = None  # kind of memory; None means GPU
    lora_name: str | None = None
    # For each block: the LoRA name, then (image hash, offset) pairs, then the cache salt.
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None  # number of the KV cache group; None means 0
    kv_cache_spec_kind: str | None = None  # the group's kind of attention (blocks/cache_groups.py)
    kv_cache_spec_sliding_window: int | None = None  # length of the group's window, in tokens
    locality: str | None = None  # REMOTE: the memory is another machine's
    metadata_only: bool = False  # True: the event describes blocks and stores none


class RemovedEvent(Struct, tag="BlockRemoved", gc=False):
    """Blocks that were evicted. Each copy of a block is reported on its own."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None


class ClearedEvent(Struct, tag="AllBlocksCleared", gc=False):
    """The cache was cleared."""


Event = StoredEvent | RemovedEvent | ClearedEvent
# Kinds of events that are read; events of other kinds are counted.
KINDS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
MAX_KINDS = 32  # unknown kinds that are counted one by one
MAX_KIND_CHARS = 64  # characters of an unknown kind that are kept


class Batch(Struct, array_like=True, gc=False):
    """The events of one step of the engine."""

    ts: float  # Unix time in seconds
    events: list[Event]


class _AnyBatch(Struct, array_like=True, gc=False):
    ts: float
    events: list[Raw]


class _AnyEvent(Struct, gc=False):
    type: str


_decode_known = msgspec.msgpack.Decoder(Batch).decode
_decode_any = msgspec.msgpack.Decoder(_AnyBatch).decode
_decode_kind = msgspec.msgpack.Decoder(_AnyEvent).decode
_decode_event = msgspec.msgpack.Decoder(Event).decode


def decode_batch(payload: bytes, skipped: Counter[str]) -> Batch:
    """Return a batch, without events of unknown kinds.

    Args:
        payload: the batch, as the server has sent it.
        skipped: the events of unknown kinds so far, by kind. Those of this batch are added.

    Raises:
        msgspec.MsgspecError: this is no batch, or an event of a known kind cannot be read.
    """
    try:
        return _decode_known(payload)
    except msgspec.ValidationError:
        batch = _decode_any(payload)
    events = list[Event]()
    for event in batch.events:
        kind = _decode_kind(event).type[:MAX_KIND_CHARS]
        if kind in KINDS:
            events.append(_decode_event(event))
        else:
            skipped[kind if kind in skipped or len(skipped) < MAX_KINDS else "other"] += 1
    return Batch(batch.ts, events)
