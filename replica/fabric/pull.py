"""Pulls: a replica copies a prompt's blocks from another replica's host memory.

The router that sends a request names the other replica, which is called the peer, so no replica
looks anything up. A pull is a hint: blocks that do not arrive are computed. Routers decide in
kvroute/features/pulls; requests, chunks and records carry these values under the feature's name.
"""

import functools
import hmac
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Annotated,
    Literal,
    NamedTuple,
    Protocol,
    TypeVar,
    runtime_checkable,
)

import msgspec
from msgspec import Meta, Struct
from pydantic import BaseModel

from kvroute.contract.records import Count, Name, Seconds
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.wire.address import TlsMode

if TYPE_CHECKING:
    from kvroute.contract.generation import GenerateRequest

FEATURE = "pulls"  # the name of the feature
MAX_WITHIN_S = 1e6  # longest time of a pull in seconds, far above any that pays off
_BLOCKS = b"kvroute blocks"

# Why a pull did not copy all blocks; empty: it copied all.
# late: the time was over. lost: there was no connection to the peer, or it broke. refused: the peer
# has another format or key, or serves too many pulls. gone: the peer does not have a block, or has
# evicted it during the copy. damaged: a checksum was wrong. full: all of the replica's own host
# memory is in use. off: the replica does not pull, or has cleared its cache during the pull.
Reason = Literal["", "late", "lost", "refused", "gone", "damaged", "full", "off"]


class PullSettings(BaseModel):
    """What engines read of the feature's settings."""

    pull: Literal["on", "off"] = "off"


class LinkSpeed(NamedTuple):
    """The speed of pulls over a link: n bytes take latency_s + n / bytes_per_s."""

    latency_s: float  # time from the start of a pull to its first bytes
    bytes_per_s: float  # bandwidth after that

    def seconds(self, size_bytes: float) -> float:
        """Return the time of a pull of so many bytes."""
        return self.latency_s + size_bytes / self.bytes_per_s


class Exchanging(Struct, frozen=True, array_like=True):
    """How an engine exchanges blocks of its host memory with others."""

    # Digest of everything that the bytes of a block depend on, besides its tokens: model, revision,
    # dtype, layout, block size, and tensor parallel size. Replicas pull from equal formats only.
    # Empty: it exchanges none.
    format: Name = ""
    address: Name = ""  # host:port at which others can pull its blocks; empty: they cannot
    # Measured times of its own pulls: latency_s, and bytes divided by bytes_per_s. Speed 0: it does
    # not pull.
    latency_s: Seconds = 0.0
    bytes_per_s: Annotated[float, Meta(ge=0, le=1e15)] = 0.0

    @property
    def speed(self) -> LinkSpeed | None:
        """Return how fast it pulls; None: it does not pull."""
        return LinkSpeed(self.latency_s, self.bytes_per_s) if self.bytes_per_s else None


class Pull(Struct, frozen=True, array_like=True):
    """Tells a replica to copy the first blocks of a prompt from a peer's host memory.

    Only routers can set it. Blocks that the replica has already are not copied.
    """

    replica_id: Name  # id of the peer's rank, as in the index
    address: Name  # host:port of the peer's block server: Exchanging.address
    key: bytes  # pull_key of the peer
    tokens: Count  # the peer has the blocks of the prompt's first tokens, up to this number
    # The pull ends after this time, in seconds since the request's arrival.
    within_s: Annotated[float, Meta(ge=0, le=MAX_WITHIN_S)]
    tls: TlsMode = "off"  # how the peer's block server encrypts


class PullResult(Struct, frozen=True, array_like=True):
    """What a pull has done."""

    tokens: Count  # prompt tokens whose blocks were copied
    size_bytes: Count  # bytes that were copied
    took_s: Seconds  # time of the copy, in seconds
    reason: Reason = ""  # why not all blocks were copied


@runtime_checkable
class ExchangingEngine(Protocol):
    """An engine whose ranks can exchange blocks of their host memory.

    It also pulls the blocks of a request with a Pull before it computes the rest of the prompt, and
    emits the PullResult in one of the chunks.
    """

    def exchanging(self) -> Exchanging:
        """Return how the engine exchanges blocks now."""

    async def pull(self, request: "GenerateRequest") -> PullResult:
        """Pull the blocks of a request with a Pull, without computing anything."""


OFF = PullResult(tokens=0, size_bytes=0, took_s=0.0, reason="off")
T = TypeVar("T", Pull, PullResult)


def carried(data: Exchanging | Pull | PullResult | None) -> dict[str, bytes]:
    """Return the `features` of a record, a request or a chunk with this data; None: it has none."""
    return {} if data is None else {FEATURE: msgspec.msgpack.encode(data)}


def carried_in(features: Mapping[str, bytes] | None, kind: type[T]) -> T | None:
    """Return the data in the `features` of a request or a chunk; None if there is none.

    What cannot be read is ignored, since a pull is a hint.
    """
    if not features or (packed := features.get(FEATURE)) is None:
        return None
    try:
        return msgspec.msgpack.decode(packed, type=kind)
    except DECODE_ERRORS:
        return None


def decode_result(packed: bytes) -> PullResult:
    """Decode the answer of a replica's method `pull`. Raises one of DECODE_ERRORS."""
    return msgspec.msgpack.decode(packed, type=PullResult)


@functools.lru_cache(maxsize=4096)
def decode_exchanging(packed: bytes) -> Exchanging:
    """Decode how an engine exchanges blocks. Raises one of DECODE_ERRORS.

    Results are cached, since every poll reads the same data again.
    """
    return msgspec.msgpack.decode(packed, type=Exchanging)


def pull_key(secret: bytes) -> bytes:
    """Return the key of a replica's block server, from the secret of the replica's address.

    Routers know the secret (wire/address.py). Peers only get this key, with which they cannot send
    requests to the replica.
    """
    return hmac.digest(secret, _BLOCKS, "sha256")
