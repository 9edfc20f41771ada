"""The messages that routers exchange about their requests: msgpack, many events per message."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvroute.contract.keep import Keep, Session, SessionTurn
from kvroute.contract.records import VERSION, Count, Name, Seconds, check_version
from kvroute.contract.unreadable import UnreadableError

FEW = 64  # most positions of its queue that a router publishes
Places = Annotated[list[Count], Meta(max_length=FEW)]
Turns = Annotated[list[Annotated[float, Meta(ge=-1e9, le=1e9)]], Meta(max_length=FEW)]
Work = Annotated[list[Seconds], Meta(max_length=FEW)]


class Sent(Struct, tag="s", array_like=True):
    """A router has sent a prompt to a replica."""

    request_id: Name
    replica_id: Name
    prefill_s: Seconds  # predicted seconds of prefill
    new_tokens: Count  # prompt tokens to compute
    prompt_tokens: Count
    known_prefix: bytes  # fingerprint of the prompt's last block that any replica has; may be empty
    expected: bytes  # fingerprints of the blocks that the request will add to the replica's cache
    lora: Name = ""
    loads_first: bool = False  # whether it waits for an adapter, or for blocks from slower tiers
    turn: SessionTurn | None = None
    keep: Keep | None = None


class FirstToken(Struct, tag="f", array_like=True):
    """A prompt has got its first token."""

    request_id: Name


class Ended(Struct, tag="e", array_like=True):
    """A prompt has ended at its replica."""

    request_id: Name
    is_tool_call: bool = False
    is_over: bool = True  # False: another replica continues it, or it was no client's request


class Restarted(Struct, tag="r", array_like=True):
    """The router has restarted: its earlier events no longer count."""


class SessionEnded(Struct, tag="d", array_like=True):
    """A client has ended a session."""

    session: Session


class Blamed(Struct, tag="b", array_like=True):
    """A request has crashed a replica: no router sends it for some minutes."""

    digest: Annotated[bytes, Meta(max_length=16)]


Event = Blamed | Sent | FirstToken | Ended | Restarted | SessionEnded


class TenantCounts(Struct, array_like=True):
    """The usage of a tenant with limits, at one router."""

    tenant: Name
    requests: Count  # running or waiting requests
    prompt_tokens: Count  # prompt tokens of these requests
    spent: Count  # uncached prompt tokens since the router began to count
    debt: Count  # uncached tokens at all routers that the rate limit has not yet restored


class Waiting(Struct, array_like=True):
    """A router's queue, at some of its positions: the three lists have one item for each."""

    places: Places = []  # positions in the queue, from 1; the last item is the queue's length
    turns_s: Turns = []  # sort key of the request at each position, in seconds from now
    work_s: Work = []  # seconds of predicted prefill of all requests up to each position

    def __post_init__(self) -> None:
        if not len(self.places) == len(self.turns_s) == len(self.work_s):
            raise ValueError("the lists of a router's queue are of different lengths")


class WaitingSessions(Struct, array_like=True, frozen=True):
    """The requests that wait in a router until their sessions have a seat."""

    requests: Count = 0
    oldest_s: Seconds = 0.0  # seconds that the oldest of these requests has waited


class LearnedScale(Struct, array_like=True, frozen=True):
    """What a router has learned of the fleet's unit of time, for routers that start."""

    prefill_s: Seconds  # mean prefill time of its latest requests
    square_s2: Annotated[float, Meta(ge=0, le=1e18)]  # mean of the squares of these times
    requests: Count  # how many requests these means are of


class Message(Struct, array_like=True):
    """One message of a router to all others."""

    version: Annotated[int, Meta(ge=0)]
    router: Name
    events: list[Event]  # empty: a heartbeat
    tenants: list[TenantCounts] = []  # usage of the tenants whose counts have changed
    is_complete: bool = False  # True: tenants that are not listed have no usage at this router
    waiting: Waiting | None = None  # None: the queue has not changed
    sessions: WaitingSessions = WaitingSessions()
    scale: LearnedScale | None = None  # in a heartbeat


class _Versioned(Struct, array_like=True):
    version: int


encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(Message)
_versions = msgspec.msgpack.Decoder(_Versioned)


def decode(payload: bytes) -> Message:
    """Decode a router's message. Raises one of unreadable.DECODE_ERRORS."""
    try:
        message = _messages.decode(payload)
    except msgspec.ValidationError:
        check_version(_versions, payload)  # a clearer error if the version is the cause
        raise
    if message.version != VERSION:
        check_version(_versions, payload)
    for event in message.events:
        if type(event) is Sent and (len(event.known_prefix) | len(event.expected)) & 7:
            raise UnreadableError("the length of its fingerprints is not a multiple of 8 bytes")
    return message
