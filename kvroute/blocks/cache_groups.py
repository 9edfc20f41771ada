"""KV cache groups of an engine.

Layers with the same kind of attention form a group and share blocks. The kind decides which blocks
must be cached for a prefix to be a hit. A cached prefix can be reused up to the longest length that
every group can serve. The block size of a group is a multiple of the fingerprints' block size.

A replica publishes a block of group g as the fingerprint at the block's end, XORed with a constant
for g. So one set of fingerprints holds the blocks of all groups. The constant of group 0 is 0: a
model with full attention only publishes plain fingerprints.

An engine may keep copies of blocks in host memory. There, group g has the number HOST_GROUPS + g.
"""

from typing import Annotated

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

# vLLM's names for kinds of attention, grouped by the blocks that a hit of L tokens needs.
FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # all blocks before L
WINDOW = frozenset({"sliding_window", "sliding_window_mla"})  # the blocks in the window before L
CHUNK = frozenset({"chunked_local_attention"})  # the blocks from the start of L's chunk to L
STATE = frozenset({"mamba"})  # only the block that ends at L

UNTOLD = "hits cannot be predicted for its engine: "  # prefix of a reason to be DEGRADED

HOST_GROUPS = 16  # group number 16 + g stands for group g's copies in host memory

_MASK = (1 << 64) - 1
# Host memory's constant is odd and no small multiple of _STEP, so that no group's constant equals
# the one of another group's copies.
_HOST = 0xD1B54A32D192ED03
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: its multiples are far from each other

Tokens = Annotated[int, Meta(ge=1, le=2**48)]


class CacheGroup(Struct, frozen=True, array_like=True):
    """The engine's groups with the same kind and sizes, as one.

    A block counts as cached only if all of these groups have it.
    """

    kind: Annotated[str, Meta(max_length=100)]
    block_tokens: Tokens
    window_tokens: Annotated[int, Meta(ge=0, le=2**48)] = 0  # length of a sliding window or chunk


class Layout(Struct, frozen=True):
    """How an engine divides its cache."""

    groups: Annotated[
        tuple[CacheGroup, ...], Meta(min_length=1, max_length=HOST_GROUPS)
    ]  # a group of full attention comes first
    hit_tokens: Tokens  # hit lengths are multiples of this number


def member(fingerprint: Fingerprint, group: int) -> Fingerprint:
    """Return what a replica publishes for the block of group `group` that ends at `fingerprint`."""
    if group >= HOST_GROUPS:
        return in_host(member(fingerprint, group - HOST_GROUPS))
    return Fingerprint(fingerprint ^ (group * _STEP & _MASK))


def in_host(member: Fingerprint) -> Fingerprint:
    """Return what a replica publishes for the copy of the same block in host memory."""
    return Fingerprint(member ^ _HOST)
