"""Retention hints: how long a replica should keep a request's blocks in its KV cache."""

from hashlib import blake2b
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

NO_BLOCK = Fingerprint(0)
SESSION_BITS = 63  # size of a session's number, in bits
MOST_TURNS = 1_000_000  # the highest number of a turn; all later turns have this number

Chance = Annotated[float, Meta(ge=0, le=1)]
Time = Annotated[float, Meta(ge=0, le=86_400)]
Session = Annotated[int, Meta(ge=0, le=2**SESSION_BITS - 1)]
Block = Annotated[Fingerprint, Meta(ge=0)]


def number_of(text: str, *, bits: int) -> int:
    """Hash a text to a number from 1 on: equal in every process, for equal texts."""
    digest = blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits) or 1


def tenant_number(name: str) -> int:
    """Return the number of a tenant; 0 for the empty name."""
    return number_of(name, bits=31) if name else 0


class Keep(Struct, frozen=True, array_like=True):
    """The retention hint for the blocks of a prompt and its answer, after the request has ended.

    The default is no hint.
    """

    # Probability that the blocks are used again, relative to that of the likeliest kind of request.
    chance: Chance = 1.0
    still_s: Time = 0.0  # seconds in which the blocks do not age
    session: Session = 0  # the session that the blocks belong to; 0: none
    tenant: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # the tenant that promised still_s; 0: none
    tool_chance: Chance = 1.0  # `chance` if the answer ends with a tool call
    tool_s: Time = 0.0  # `still_s` if the answer ends with a tool call; always learned
    is_promised: bool = True  # whether the client promised still_s; False: it was learned

    @property
    def after_tool_call(self) -> "Keep":
        """Return the hint for an answer that ends with a tool call."""
        return Keep(
            self.tool_chance,
            max(self.still_s, self.tool_s),
            self.session,
            self.tenant,
            is_promised=self.is_promised and (self.still_s > 0 or not self.tool_s > 0),
        )


KEEP = Keep()


def over(session: int) -> Keep:
    """Return the hint for an ended session: its blocks will not be used again."""
    return Keep(0.0, session=session, tool_chance=0.0)


class SessionTurn(NamedTuple):
    """A prompt as one turn of a conversation."""

    end: Block  # the prompt's last reusable block; NO_BLOCK: it has none
    session: Session
    number: Annotated[int, Meta(ge=1, le=MOST_TURNS)]  # position in the conversation, from 1
    before: Block = NO_BLOCK  # `end` of the previous turn
    is_named: bool = False  # whether the client sent an id of the session
    is_last: bool = False  # whether the client declared this turn as the last one
