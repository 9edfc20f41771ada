"""What a replica keeps warm, that is, in its cache. Its record in Redis has this for routers."""

import functools
from collections.abc import Mapping
from contextlib import suppress

import msgspec
from msgspec import Struct

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.records import Count, Name, ReplicaRecord
from kvroute.contract.unreadable import DECODE_ERRORS


class Warm(Struct, frozen=True, array_like=True):
    """The beginning of the prompts with a prefix, which a replica has in its cache."""

    blocks: Count  # full blocks of the beginning, all of which this replica has computed
    is_pinned: bool  # whether the blocks cannot be evicted
    is_in_host: bool = False  # whether they are pinned in host memory instead of the KV cache

    @property
    def tier(self) -> Tier:
        """Return the tier in which the blocks are pinned."""
        return HOST if self.is_in_host else GPU


def warm_at(record: ReplicaRecord) -> Mapping[str, Warm]:
    """Return what a replica keeps warm, by Prefix.name; nothing if this cannot be read."""
    packed = record.load.features.get("prefixes")
    with suppress(*DECODE_ERRORS):
        return _decode(packed) if packed else {}
    return {}


@functools.lru_cache(maxsize=4096)  # every poll reads the same data again
def _decode(packed: bytes) -> Mapping[str, Warm]:
    return msgspec.msgpack.decode(packed, type=dict[Name, Warm])
