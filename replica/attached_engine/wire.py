"""The KV cache events of a vLLM server, as its ZMQ publisher encodes them.

Only the fields that kvroute reads are declared. vLLM adds fields at the end of an event, which are
ignored here.
"""

from typing import Any

import msgspec
from msgspec import Struct

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


class RemovedEvent(Struct, tag="BlockRemoved", gc=False):
    """Blocks that were evicted. Each copy of a block is reported on its own."""

    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: int | None = None


class ClearedEvent(Struct, tag="AllBlocksCleared", gc=False):
    """The cache was cleared."""


class Batch(Struct, array_like=True, gc=False):
    """The events of one step of the engine."""

    ts: float  # Unix time in seconds
    events: list[StoredEvent | RemovedEvent | ClearedEvent]


decode_batch = msgspec.msgpack.Decoder(Batch).decode
