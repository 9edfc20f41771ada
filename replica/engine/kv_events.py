"""The events that an engine emits about its KV cache, in order.

Each group of an engine's KV cache has its own blocks (blocks/cache_groups.py), and the engine's
number for it. An engine with n groups and a host tier has n further groups: group n + g has the
blocks of group g that are in host memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvroute.blocks.fingerprint import Fingerprint

BlockHash = int | bytes  # the engine's own id of a block's content; used only in the replica


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[BlockHash]  # one for each block
    fingerprints: Sequence[Fingerprint]  # for each block: fingerprint of the prompt up to its end
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

    copies: Sequence[Mapping[BlockHash, int]]  # for each group: number of blocks under each hash


@dataclass(frozen=True, slots=True)
class Transfers:
    """Copies between the engine's memory and host memory, since the last event of this kind."""

    reloaded_tokens: int = 0  # prompt tokens whose blocks came from host memory
    in_bytes: int = 0  # bytes copied from host memory to the engine
    in_s: float = 0.0  # seconds of these copies
    out_bytes: int = 0  # bytes copied from the engine to host memory
    out_s: float = 0.0  # seconds of these copies


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsLost | BlocksHeld | Transfers
