"""The events that an engine emits about its KV cache, in order.

Each group of an engine's KV cache has blocks of its own (blocks/cache_groups.py); its number is
the engine's. An engine of n groups that keeps blocks in host memory too has n more: number n + g is
what host memory has of group g.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvroute.blocks.fingerprint import Fingerprint

BlockHash = int | bytes  # the engine's own id of a block; never leaves the replica


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[BlockHash]  # one for each block
    fingerprints: Sequence[Fingerprint]  # of the prompt up to each block's end
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[BlockHash]
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine cleared its cache."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events were lost between the engine and the replica: the block table may be wrong."""


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """All blocks that the engine has cached, after the events before this one."""

    copies: Sequence[Mapping[BlockHash, int]]  # of each group: blocks under each hash


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between the engine's memory and host memory, since the last event of this kind."""

    reloaded_tokens: int = 0  # of prompts, that host memory delivered
    in_bytes: int = 0  # from host memory to the engine
    in_s: float = 0.0
    out_bytes: int = 0
    out_s: float = 0.0


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsLost | BlocksHeld | Transfers
