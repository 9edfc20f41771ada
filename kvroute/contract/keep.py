"""Retention hints: how a replica keeps a request's blocks after the request has ended."""

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


def tenant_number(name: str) -> int:
    """Return the number of a tenant; 0 for the empty name."""
    return hash_number(name, bits=31) if name else 0


class Order(IntEnum):
    """The order of eviction: blocks with a smaller value are evicted first."""

    ENDED = 0  # blocks of a session that the client has ended
    UNLIKELY = 1  # blocks of a conversation that will probably not continue
    USUAL = 2  # all other blocks


class RetentionHint(Struct, frozen=True, array_like=True):
    """Tells an engine when to evict the blocks of a prompt and its answer. Default: no hint."""

    order: Order = Order.USUAL
    session: Session = 0  # the session that the blocks belong to; 0: unknown


BATCH_SESSION = 1  # session of the blocks that only batch requests have used


def batch_hint(hint: RetentionHint, *, is_named: bool) -> RetentionHint:
    """Return the hint for a batch request's blocks, which are evicted before those of others.

    Blocks that other requests have used, too, are not affected. If the client has named the
    session, further turns may follow, so blocks of ended sessions go first.

    Args:
        hint: the hint that the request would have otherwise.
        is_named: whether the client sent an id of the session.
    """
    if not is_named:
        return RetentionHint(Order.ENDED, BATCH_SESSION)
    return RetentionHint(min(hint.order, Order.UNLIKELY), hint.session)


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
