"""The messages that routers exchange about their requests, in msgpack, each with many events."""

from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint, pack, unpack
from kvroute.contract.keep import Session, SessionTurn
from kvroute.contract.records import VERSION, Count, Name, Seconds, check_version

MAX_POSITIONS = 64  # maximum number of queue positions that a router publishes
Places = Annotated[list[Count], Meta(max_length=MAX_POSITIONS)]
Turns = Annotated[list[Annotated[float, Meta(ge=-1e9, le=1e9)]], Meta(max_length=MAX_POSITIONS)]
Work = Annotated[list[Seconds], Meta(max_length=MAX_POSITIONS)]


class Fingerprints:
    """Fingerprints of blocks. A message has eight little-endian bytes for each fingerprint."""

    __slots__ = ("blocks",)

    def __init__(self, blocks: Iterable[Fingerprint] = ()) -> None:
        self.blocks = tuple(blocks)


class Dispatch(Struct, tag="s", array_like=True, frozen=True):
    """A prompt that a router has sent to a replica, with the facts that other routers need."""

    request_id: Name
    replica_id: Name
    prefill_s: Seconds  # predicted seconds of prefill
    new_tokens: Count  # prompt tokens to compute
    prompt_tokens: Count
    known_prefix: Fingerprints  # only the prompt's last block that some replica has cached, if any
    expected: Fingerprints  # the blocks that the prompt will add to the replica's cache
    variant: Name = ""
    loads_first: bool = False  # whether an adapter or blocks from slower tiers must be loaded first
    turn: SessionTurn | None = None  # place of the prompt in its conversation; None: unknown
    is_batch: bool = False  # whether it gives way to others at the replica

    @property
    def known_block(self) -> Fingerprint | None:
        """Return the prompt's last block that some replica has cached; None: there is none."""
        blocks = self.known_prefix.blocks
        return blocks[-1] if blocks else None


class FirstToken(Struct, tag="f", array_like=True):
    """A prompt has received its first token."""

    request_id: Name


class RequestEnded(Struct, tag="e", array_like=True):
    """A prompt has ended at its replica."""

    request_id: Name
    is_final: bool = True  # False: another replica continues it, or it had no client


class Restarted(Struct, tag="r", array_like=True):
    """The router has restarted: its earlier events no longer count."""


class SessionEnded(Struct, tag="d", array_like=True):
    """A client has ended a session."""

    session: Session


class PoisonedRequest(Struct, tag="b", array_like=True):
    """A request has crashed a replica, so no router dispatches it again for some minutes."""

    digest: Annotated[bytes, Meta(max_length=16)]  # digest of the request


Event = PoisonedRequest | Dispatch | FirstToken | RequestEnded | Restarted | SessionEnded


class Waiting(Struct, array_like=True):
    """Some positions of a router's queue; each of the three lists has one item per position."""

    places: Places = []  # positions in the queue, from 1; the last item is the queue's length
    turns_s: Turns = []  # sort key of the request at each position, in seconds from now
    work_s: Work = []  # seconds of predicted prefill of all requests up to each position

    def __post_init__(self) -> None:
        if not len(self.places) == len(self.turns_s) == len(self.work_s):
            raise ValueError("the lists that describe a router's queue have different lengths")


class LearnedScale(Struct, array_like=True, frozen=True):
    """A router's mean prefill time per request, for routers that have just started."""

    prefill_s: Seconds  # mean prefill time of its latest requests
    square_s2: Annotated[float, Meta(ge=0, le=1e18)]  # mean of the squares of these times
    requests: Count  # number of requests in these means


# What newer routers send in the places that only older ones read, and which tell them nothing. So
# both read each other's messages. Newer routers ignore what they get there.
NO_TENANTS = msgspec.Raw(msgspec.msgpack.encode([]))
NOT_COMPLETE = msgspec.Raw(msgspec.msgpack.encode(False))
NO_SESSIONS = msgspec.Raw(msgspec.msgpack.encode([0, 0.0]))


class RouterMessage(Struct, array_like=True):
    """One message of a router to all others."""

    version: Annotated[int, Meta(ge=0)]
    router: Name
    events: list[Event]  # empty: a heartbeat
    no_tenants: msgspec.Raw = NO_TENANTS
    not_complete: msgspec.Raw = NOT_COMPLETE
    waiting: Waiting | None = None  # None: the queue has not changed
    no_sessions: msgspec.Raw = NO_SESSIONS
    scale: LearnedScale | None = None  # only heartbeats have it
    # The router's Ray cluster and application. Routers of other ones have other replicas. Empty:
    # unknown, because the router has an older version.
    origin: Name = ""
    features: dict[Name, bytes] = {}  # name of a feature -> what it shares, which only it can read


class _Versioned(Struct, array_like=True):
    version: int


def _packed(fingerprints: Fingerprints) -> bytes:
    return pack(fingerprints.blocks)


def _unpacked(_: type, packed: object) -> Fingerprints:
    if not isinstance(packed, bytes) or len(packed) & 7:
        raise ValueError("its fingerprints are not 8 bytes each")
    return Fingerprints(unpack(packed))


encode = msgspec.msgpack.Encoder(enc_hook=_packed).encode
_messages = msgspec.msgpack.Decoder(RouterMessage, dec_hook=_unpacked)
_versions = msgspec.msgpack.Decoder(_Versioned)


def decode(payload: bytes) -> RouterMessage:
    """Decode a router's message. Raises one of unreadable.DECODE_ERRORS."""
    try:
        message = _messages.decode(payload)
    except msgspec.ValidationError:
        check_version(_versions, payload)  # raises a clearer error if the version is the cause
        raise
    if message.version != VERSION:
        check_version(_versions, payload)
    return message
