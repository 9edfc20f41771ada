"""The events that an engine emits about its KV cache, in order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BlockHash = int | bytes  # the engine's own id of a block; never leaves the replica


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[BlockHash]  # one for each block, in prompt order
    parent: BlockHash | None  # the block before the first; None at the start of a prompt
    token_ids: Sequence[int]  # block_size ids for each block
    namespace: str = ""  # cache salt; set only with a prompt's first block
    lora: str = ""  # the adapter that computed them


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine cleared its cache."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events were lost between the engine and the replica: the block table may be wrong."""


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """All blocks that the engine has cached, after the events before this one."""

    copies: Mapping[BlockHash, int]  # blocks under each hash


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsLost | BlocksHeld
