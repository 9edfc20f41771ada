"""An engine's KV cache groups: the layers of one attention kind share blocks, and the kind says
which blocks a hit needs.

A hit ends at the deepest boundary that every group can serve. Each group has blocks of its own
size, a multiple of the fingerprints' block size. A replica announces a group's block as the
fingerprint at its end, changed by the group's number: so one set of fingerprints holds all groups,
and a model with full attention alone has plain ones.

An engine may keep copies of blocks in host memory. There, group g has the number HOST_GROUPS + g.
"""

from typing import Annotated

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

# vLLM's names of the kinds, by what a hit of L tokens needs.
FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # all blocks before L
WINDOW = frozenset({"sliding_window", "sliding_window_mla"})  # those in the window before L
CHUNK = frozenset({"chunked_local_attention"})  # those from the start of L's chunk to L
STATE = frozenset({"mamba"})  # the one that ends at L

UNTOLD = "no hits can be told for its engine: "  # begins why a replica is DEGRADED

HOST_GROUPS = 16  # from this number on: what host memory has of the group of 16 less

_MASK = (1 << 64) - 1
_HOST = 0xD1B54A32D192ED03  # any odd number that is no multiple of _STEP near 0
_STEP = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: its multiples are far from each other

Tokens = Annotated[int, Meta(ge=1, le=2**48)]


class CacheGroup(Struct, frozen=True, array_like=True):
    """All of an engine's groups that have the same kind and sizes; a block counts where each of
    them has it."""

    kind: Annotated[str, Meta(max_length=100)]
    block_tokens: Tokens
    window_tokens: Annotated[int, Meta(ge=0, le=2**48)] = 0  # of a sliding window, or of a chunk


class Layout(Struct, frozen=True):
    """How an engine divides its cache."""

    groups: Annotated[
        tuple[CacheGroup, ...], Meta(min_length=1, max_length=HOST_GROUPS)
    ]  # FULL first
    hit_tokens: Tokens  # the length of a hit is a multiple of it


def member(fingerprint: Fingerprint, group: int) -> Fingerprint:
    """What is announced for the block that ends there, of the group of this number."""
    if group >= HOST_GROUPS:
        return in_host(member(fingerprint, group - HOST_GROUPS))
    return Fingerprint(fingerprint ^ (group * _STEP & _MASK))


def in_host(member: Fingerprint) -> Fingerprint:
    """What is announced for the same block in host memory."""
    return Fingerprint(member ^ _HOST)
