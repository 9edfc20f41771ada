"""The address on which a replica listens for routers.

The routers find it in the routing stats that each replica reports to Ray Serve.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

# How a server encrypts its connections. off: it does not. made: with certificates that both ends
# make from its secret. files: with certificates of an authority that operators have.
TlsMode = Literal["off", "made", "files"]

STATS_KEY = "kvroute_address"  # key of the address in the replica's routing stats of Ray Serve


class Address(Struct, frozen=True):
    """The address of one replica, and what a router must know to connect to it."""

    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    secret: bytes  # a random key with which the replica and its routers authenticate each other
    ranks: Annotated[int, Meta(ge=1, le=4096)] = 1  # data parallel ranks, each with its own cache
    tls: TlsMode = "off"  # how connections to it are encrypted

    def as_stats(self) -> dict[str, Any]:
        """Return the entry for the replica's routing stats of Ray Serve."""
        return {STATS_KEY: msgspec.msgpack.encode(self)}


def address_in(stats: object) -> Address:
    """Return the address in a replica's routing stats.

    Raises one of DECODE_ERRORS if it is missing or unreadable.
    """
    packed = stats.get(STATS_KEY) if isinstance(stats, dict) else None
    if not isinstance(packed, bytes):
        raise ValueError(
            "the replica has published no address; run the same kvroute version everywhere"
        )
    return msgspec.msgpack.decode(packed, type=Address)
