"""KV cache groups of an engine.

Layers with the same kind of attention form a group and share blocks. The kind decides which blocks
must be cached for a prefix to be a hit. A cached prefix can be reused up to the longest length that
every group can serve. The block size of a group is a multiple of the fingerprints' block size, so a
block of the group may cover several fingerprints.

A replica publishes a block of group g as the last fingerprint in the block, XORed with a constant
for g. So one set of fingerprints holds the blocks of all groups. The constant of group 0 is 0: if a
model has only full attention, its replicas publish plain fingerprints.

An engine may keep copies of blocks in slower tiers of memory (tiers.py). A group has a different
number in each tier.
"""

from typing import Annotated

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import DISK, GROUPS, HOST, TIERS

# vLLM's names for kinds of attention, grouped by the blocks that a hit of L tokens needs.
FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # all blocks before L
WINDOW = frozenset({"sliding_window", "sliding_window_mla"})  # the blocks in the window before L
CHUNK = frozenset({"chunked_local_attention"})  # the blocks from the start of L's chunk to L
STATE = frozenset({"mamba"})  # only the block that ends at L

# Routers ignore the cache of a DEGRADED replica, for a reason that they report. The reason starts
# with this text if the engine's layout is unknown.
UNKNOWN_LAYOUT = "hits cannot be predicted for its engine: "

HOST_GROUPS = GROUPS * HOST.number  # the number of group g in host memory is HOST_GROUPS + g
DISK_GROUPS = GROUPS * DISK.number  # the number of group g in the disk cache is DISK_GROUPS + g

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # 2**64 / the golden ratio: its multiples are far from each other

Tokens = Annotated[int, Meta(ge=1, le=2**48)]


class CacheGroup(Struct, frozen=True, array_like=True):
    """All groups of an engine with the same kind of attention and the same sizes.

    A block counts as cached only if all of these groups have it.
    """

    kind: Annotated[str, Meta(max_length=100)]
    block_tokens: Tokens  # tokens of one block
    window_tokens: Annotated[int, Meta(ge=0, le=2**48)] = 0  # length of a sliding window or chunk


class Layout(Struct, frozen=True):
    """The KV cache groups of an engine, and the lengths that its hits can have."""

    # If there is a group with full attention, it is the first one.
    groups: Annotated[tuple[CacheGroup, ...], Meta(min_length=1, max_length=GROUPS)]
    hit_tokens: Tokens  # the length of every hit is a multiple of this number of tokens


def group_fingerprint(fingerprint: Fingerprint, group: int) -> Fingerprint:
    """Return the fingerprint that a replica publishes for a block of a group.

    Args:
        fingerprint: the last fingerprint in the block.
        group: number of the group in the block's tier, such as HOST_GROUPS + 1.
    """
    tier, group = divmod(group, GROUPS)
    return TIERS[tier].fingerprint(Fingerprint(fingerprint ^ (group * _STEP & _MASK)))
