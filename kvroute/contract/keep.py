"""How a replica keeps a request's blocks in its KV cache, once the request has ended."""

from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

NO_BLOCK = Fingerprint(0)
SESSION_BITS = 63  # of a session's number
MOST_TURNS = 1_000_000  # further turns of a conversation have this number

Session = Annotated[int, Meta(ge=0, le=2**SESSION_BITS - 1)]
Block = Annotated[Fingerprint, Meta(ge=0)]


def number_of(text: str, *, bits: int) -> int:
    """Return a number for the text, which is the same everywhere and is not 0."""
    digest = blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits) or 1


def tenant_number(name: str) -> int:
    """Return a number for the tenant; 0: the name is empty."""
    return number_of(name, bits=31) if name else 0


class Order(IntEnum):
    """The order of eviction: blocks of a smaller value go first."""

    ENDED = 0  # the client has said that the session is over
    UNLIKELY = 1  # few conversations go on after such a turn
    USUAL = 2


class Keep(Struct, frozen=True, array_like=True):
    """What a request says of the blocks of its prompt and its answer. The default is what holds for
    a request that says nothing."""

    order: Order = Order.USUAL
    session: Session = 0  # the session that the request belongs to; 0: unknown


class SessionTurn(NamedTuple):
    """A prompt as one turn of a conversation."""

    end: Block  # the prompt's last reusable block; NO_BLOCK: it has none
    session: Session
    number: Annotated[int, Meta(ge=1, le=MOST_TURNS)]
    before: Block = NO_BLOCK  # the end of the turn before
    is_named: bool = False  # the client has named the session
    is_last: bool = False  # the client has said so
    has_tools: bool = False  # the model may call tools
    tenant: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # a number for the tenant; 0: there is none
