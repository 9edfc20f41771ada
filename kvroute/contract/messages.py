"""The messages that routers exchange about their requests: msgpack, many events per message."""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from kvroute.contract.keep import Session, SessionTurn
from kvroute.contract.records import VERSION, Count, Name, Seconds, check_version
from kvroute.contract.unreadable import UnreadableError

FEW = 64  # places that a router tells of its waiting requests
Places = Annotated[list[Count], Meta(max_length=FEW)]
Turns = Annotated[list[Annotated[float, Meta(ge=-1e9, le=1e9)]], Meta(max_length=FEW)]
Work = Annotated[list[Seconds], Meta(max_length=FEW)]


class Sent(Struct, tag="s", array_like=True):
    request_id: Name
    replica_id: Name
    prefill_s: Seconds
    new_tokens: Count
    prompt_tokens: Count
    known_prefix: bytes
    expected: bytes
    lora: Name = ""
    loads_first: bool = False  # an adapter, or blocks from host memory
    turn: SessionTurn | None = None


class FirstToken(Struct, tag="f", array_like=True):
    request_id: Name


class Ended(Struct, tag="e", array_like=True):
    request_id: Name
    is_over: bool = True  # else it goes on elsewhere, or was none


class Restarted(Struct, tag="r", array_like=True):
    """All earlier events of this router are void."""


class SessionEnded(Struct, tag="d", array_like=True):
    session: Session


class Blamed(Struct, tag="b", array_like=True):
    """A request stopped a replica: no router sends it for some minutes."""

    digest: Annotated[bytes, Meta(max_length=16)]


Event = Blamed | Sent | FirstToken | Ended | Restarted | SessionEnded


class TenantCounts(Struct, array_like=True):
    """What a tenant with limits has at one router."""

    tenant: Name
    requests: Count  # under way
    prompt_tokens: Count  # of those
    spent: Count  # uncached prompt tokens since the router began to count them
    debt: Count  # uncached tokens, at all routers, that the time since has not made good


class Waiting(Struct, array_like=True):
    """The requests that wait in a router, in the order of their turns, some of them left out."""

    places: Places = []  # in that order, from 1; the last one is the number of all
    turns_s: Turns = []  # of the request at each place, seconds from now
    work_s: Work = []  # of predicted prefill, of all up to each place

    def __post_init__(self) -> None:
        if not len(self.places) == len(self.turns_s) == len(self.work_s):
            raise ValueError("its lists are of different lengths")


class WaitingSessions(Struct, array_like=True, frozen=True):
    """The requests that wait in a router until their sessions have a seat."""

    requests: Count = 0
    oldest_s: Seconds = 0.0  # how long the first of them has waited


class LearnedScale(Struct, array_like=True, frozen=True):
    """What a router has learned of the fleet's unit of time, for routers that start."""

    prefill_s: Seconds  # mean prefill time of its latest requests
    square_s2: Annotated[float, Meta(ge=0, le=1e18)]  # mean of the squares of these times
    requests: Count  # how many requests these means are of


class Message(Struct, array_like=True):
    version: Annotated[int, Meta(ge=0)]
    router: Name
    events: list[Event]  # empty: a heartbeat
    tenants: list[TenantCounts] = []  # those whose counts have changed
    is_complete: bool = False  # other tenants have nothing at this router
    waiting: Waiting | None = None  # None: as before
    sessions: WaitingSessions = WaitingSessions()
    scale: LearnedScale | None = None  # in a heartbeat


class _Versioned(Struct, array_like=True):
    version: int


encode = msgspec.msgpack.Encoder().encode
_messages = msgspec.msgpack.Decoder(Message)
_versions = msgspec.msgpack.Decoder(_Versioned)


def decode(payload: bytes) -> Message:
    """Raises one of unreadable.DECODE_ERRORS."""
    try:
        message = _messages.decode(payload)
    except msgspec.ValidationError:
        check_version(_versions, payload)  # a clearer error if the version is the cause
        raise
    if message.version != VERSION:
        check_version(_versions, payload)
    for event in message.events:
        if type(event) is Sent and (len(event.known_prefix) | len(event.expected)) & 7:
            raise UnreadableError("its fingerprints are not of 8 bytes each")
    return message
