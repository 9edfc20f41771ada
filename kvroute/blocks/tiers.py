"""The memories in which an engine keeps blocks of its KV cache.

A replica announces a block once for each tier that holds it, under a fingerprint of that tier. A
hit starts with blocks in GPU memory. Blocks behind it are copied back from slower tiers before the
engine computes the rest.

A new tier is one more value here, the facts of it in a replica's record, and an engine that copies
its blocks. The index, placement, metrics and receipts work with any number of tiers.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint

GROUPS = 16  # cache groups that an engine can have in each tier


class Tier(NamedTuple):
    """One kind of memory."""

    number: int  # cache group g of this tier has the number GROUPS * number + g
    name: str  # in records, metrics and receipts
    label: str  # in sentences
    mark: int  # the bits in which its fingerprints differ from those of GPU memory
    pin_options: str  # the options that set how much of it pins may take

    def member(self, fingerprint: Fingerprint) -> Fingerprint:
        """Return what is announced for a block in this tier; the inverse is the same."""
        return Fingerprint(fingerprint ^ self.mark)


GPU = Tier(number=0, name="gpu", label="its KV cache", mark=0, pin_options="--pin-share")
HOST = Tier(
    number=1,
    name="host",
    label="host memory",
    # Odd and no small multiple of the constant of cache groups, so that no block of a group has the
    # fingerprint of another group's copy.
    mark=0xD1B54A32D192ED03,
    pin_options="--pin-share or --host-cache-gb",
)
SLOWER: Sequence[Tier] = (HOST,)  # behind GPU memory, the fastest first
TIERS: Sequence[Tier] = (GPU, *SLOWER)  # by their numbers


def up_to(tier: Tier) -> Sequence[Tier]:
    """Return the slower tiers that are no slower than this one."""
    return SLOWER[: tier.number]


class TierBlocks(NamedTuple):
    """Consecutive blocks of a prompt that one tier holds."""

    tier: Tier
    blocks: int
