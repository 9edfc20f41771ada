"""The turns of sessions, and hints for engines: when to evict a request's blocks after its end."""

from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

NO_BLOCK = Fingerprint(0)  # in place of a block that does not exist
SESSION_BITS = 63  # bits of the number that identifies a session
MAX_TURNS = 1_000_000  # highest number of a turn; later turns also get this number

# Identifies a session: a hash of the client's session id, or a random number if there is none.
Session = Annotated[int, Meta(ge=0, le=2**SESSION_BITS - 1)]
Block = Annotated[Fingerprint, Meta(ge=0)]


def hash_number(text: str, *, bits: int) -> int:
    """Hash a text to a number of at most `bits` bits, which is never 0.

    Equal texts have equal numbers in every process.
    """
    digest = blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits) or 1


class Order(IntEnum):
    """The order of eviction: blocks with a smaller value are evicted first."""

    ENDED = 0  # blocks of a session that the client has ended
    UNLIKELY = 1  # blocks of a session that will probably not continue
    USUAL = 2  # all other blocks


# Name of each Order in metrics and receipts.
EVICTION_REASONS = tuple(order.name.lower() for order in Order)


class RetentionHint(Struct, frozen=True, array_like=True):
    """Tells an engine when to evict the blocks of a prompt and its answer. Default: no hint."""

    order: Order = Order.USUAL
    session: Session = 0  # the session that the blocks belong to; 0: unknown


class SessionTurn(NamedTuple):
    """The place of a prompt in its session."""

    end: Block  # the prompt's last block that later prompts can reuse; NO_BLOCK: it has none
    session: Session
    # Position among the turns that continue each other, from 1. A session of an agent can have
    # several such sequences of turns.
    number: Annotated[int, Meta(ge=1, le=MAX_TURNS)]
    before: Block = NO_BLOCK  # `end` of the turn that this one continues
    is_named: bool = False  # whether the client sent an id of the session
    is_last: bool = False  # whether the client declared that the session ends with this turn
    has_tools: bool = False  # whether the model may call tools
    tenant: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # number of the tenant; 0: no tenant
