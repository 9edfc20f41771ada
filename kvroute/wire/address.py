"""Where a replica listens for routers, as it tells them through Ray Serve."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

STATS_KEY = "kvroute_address"  # in what Serve calls a replica's routing stats


class Address(Struct, frozen=True):
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: bytes  # that routers and this replica have in common
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1  # data parallel ranks, each with its own cache

    def as_stats(self) -> dict[str, Any]:
        return {STATS_KEY: msgspec.msgpack.encode(self)}


def address_in(stats: object) -> Address:
    """Raises one of DECODE_ERRORS when it is not there, or cannot be read."""
    packed = stats.get(STATS_KEY) if isinstance(stats, dict) else None
    if not isinstance(packed, bytes):
        raise ValueError("the replica says no address; it is of another version")
    return msgspec.msgpack.decode(packed, type=Address)
