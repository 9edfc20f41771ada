"""The turns of sessions, and hints for engines: when to evict a request's blocks after its end."""

from enum import IntEnum
from hashlib import blake2b
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

NO_BLOCK = Fingerprint(0)  # in place of a block that does not exist
SESSION_BITS = 63  # size of a session's number, in bits
MAX_TURNS = 1_000_000  # highest number of a conversation's turn; later turns also get this number

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
    UNLIKELY = 1  # blocks of a conversation that will probably not continue
    USUAL = 2  # all other blocks


# Words for the order in which blocks were evicted, by Order.
EVICTION_REASONS = tuple(order.name.lower() for order in Order)


class RetentionHint(Struct, frozen=True, array_like=True):
    """Tells an engine when to evict the blocks of a prompt and its answer. Default: no hint."""

    order: Order = Order.USUAL
    session: Session = 0  # the session that the blocks belong to; 0: unknown


class SessionTurn(NamedTuple):
    """The place of a prompt in its conversation."""

    end: Block  # the prompt's last block that later prompts can reuse; NO_BLOCK: it has none
    session: Session
    number: Annotated[int, Meta(ge=1, le=MAX_TURNS)]  # position in the conversation, from 1
    before: Block = NO_BLOCK  # `end` of the previous turn
    is_named: bool = False  # whether the client sent an id of the session
    is_last: bool = False  # whether the client declared that the conversation ends with this turn
    has_tools: bool = False  # whether the model may call tools
    tenant: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # number of the tenant; 0: no tenant
