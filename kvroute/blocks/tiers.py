"""Tiers: the kinds of memory in which an engine keeps blocks of its KV cache.

A replica publishes a block once for each tier that holds it, with a different fingerprint for each
tier. A hit consists of blocks in GPU memory, followed by blocks in slower tiers. The engine copies
the latter to GPU memory before it computes the remaining tokens of the prompt.

To add a tier, add a value here, add its TierFacts to the replica's record, and let an engine copy
blocks to it. All other parts of kvroute work with any number of tiers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint

GROUPS = 16  # cache groups that an engine can have in each tier


class Tier(NamedTuple):
    """One kind of memory."""

    # Index in TIERS. Cache groups (cache_groups.py) are numbered through all tiers: group g of this
    # tier has the number GROUPS * number + g.
    number: int
    name: str  # the tier's name in records, metrics and receipts
    label: str  # the tier's name in sentences for users
    mark: int  # XORed into the fingerprints of blocks in this tier
    pin_options: str  # options that limit the share of this tier for pinned blocks

    def fingerprint(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return the fingerprint that a replica publishes for a block in this tier.

        The function is its own inverse: it also maps the published fingerprint to the block's.
        """
        return Fingerprint(fingerprint ^ self.mark)


GPU = Tier(number=0, name="gpu", label="its KV cache", mark=0, pin_options="--pin-share")
HOST = Tier(
    number=1,
    name="host",
    label="host memory",
    # A block in host memory must never have the fingerprint that the same block has in another
    # cache group in GPU memory. So this is no XOR of two small multiples of cache_groups._STEP.
    mark=0xD1B54A32D192ED03,
    pin_options="--pin-share or --host-cache-gb",
)
DISK = Tier(
    number=2,
    name="disk",
    label="the disk cache",
    mark=0x8CB92BA72F3D8DD7,  # chosen as HOST's mark
    pin_options="",  # pins keep blocks in faster tiers only
)
SLOWER: Sequence[Tier] = (HOST, DISK)  # all tiers but GPU memory, the fastest first
TIERS: Sequence[Tier] = (GPU, *SLOWER)  # all tiers; the index is the tier's number

# The host memory of another replica, from which blocks are pulled (kvroute/features/pulls). No
# replica publishes blocks in this tier: they are published in the other replica's host memory.
PEER = Tier(
    number=GROUPS - 1, name="peer", label="another replica's host memory", mark=0, pin_options=""
)


def up_to(tier: Tier) -> Sequence[Tier]:
    """Return this tier and all faster ones, without GPU memory."""
    return SLOWER[: tier.number]


class TierBlocks(NamedTuple):
    """Consecutive blocks of a prompt that one tier holds."""

    tier: Tier
    blocks: int
