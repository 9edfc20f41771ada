"""The events that an engine emits about its KV cache, in order.

An engine's KV cache consists of groups, and each group has its own blocks (blocks/cache_groups.py).
Events contain the engine's number of the group. An engine with n groups and a host tier has n
further groups: group n + g contains the blocks of group g that are in host memory. With a disk
cache, the groups from 2n on contain the blocks on the disk.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import EngineFacts

BlockHash = int | bytes  # the engine's hash of a block's content; only the replica uses it


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks were added to the cache."""

    block_hashes: Sequence[BlockHash]
    # For each block, the fingerprint of the prompt up to the block's end.
    fingerprints: Sequence[Fingerprint]
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks were evicted from the cache."""

    block_hashes: Sequence[BlockHash]
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine cleared its cache."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events between the engine and the replica were lost.

    The replica's list of cached blocks (block_table.py) may be wrong.
    """


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """A list of all cached blocks, after all earlier events and before all later ones."""

    copies: Sequence[Mapping[BlockHash, int]]  # for each group, number of blocks under each hash


@dataclass(frozen=True, slots=True)
class Transfers:
    """Totals of the copies between the engine and host memory since the last Transfers event."""

    reloaded_tokens: int = 0  # prompt tokens whose blocks came from host memory
    in_bytes: int = 0  # bytes copied from host memory to the engine
    in_s: float = 0.0  # time of the copies to the engine
    out_bytes: int = 0  # bytes copied from the engine to host memory
    out_s: float = 0.0  # time of the copies to host memory
    disk_in_bytes: int = 0  # bytes read from the disk cache to host memory
    disk_in_s: float = 0.0  # time of these reads
    disk_out_bytes: int = 0  # bytes written to the disk cache
    disk_failures: int = 0  # writes and reads of the disk cache that failed


@dataclass(frozen=True, slots=True)
class LayoutChanged:
    """The engine's KV cache has other groups or tiers than its replica has published.

    All cached blocks follow, with new numbers of groups. Only attached engines emit this event: a
    server names its groups when it stores their first blocks.
    """

    facts: EngineFacts  # the engine's facts from now on
    group_entries: Sequence[int | None]  # Engine.group_entries from now on


KVEvent = (
    BlockStored
    | BlockRemoved
    | AllBlocksCleared
    | EventsLost
    | BlocksHeld
    | Transfers
    | LayoutChanged
)
