"""How long a replica keeps a request's blocks in its KV cache, as far as a router knows."""

from hashlib import blake2b
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from kvroute.blocks.fingerprint import Fingerprint

NO_BLOCK = Fingerprint(0)
SESSION_BITS = 63  # of a session's number
MOST_TURNS = 1_000_000  # further ones have the same number

Chance = Annotated[float, Meta(ge=0, le=1)]
Time = Annotated[float, Meta(ge=0, le=86_400)]
Session = Annotated[int, Meta(ge=0, le=2**SESSION_BITS - 1)]
Block = Annotated[Fingerprint, Meta(ge=0)]


def number_of(text: str, *, bits: int) -> int:
    """The same for equal texts, everywhere; not 0."""
    digest = blake2b(text.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - bits) or 1


def tenant_number(name: str) -> int:
    """Of who promises; 0: nobody in particular."""
    return number_of(name, bits=31) if name else 0


class Keep(Struct, frozen=True, array_like=True):
    """Of a prompt and its answer, once the request has ended. The default says nothing."""

    chance: Chance = 1.0  # that they are used again, over the likeliest kind's; 0: they are not
    still_s: Time = 0.0  # in which they do not age: somebody has promised to come back
    session: Session = 0  # whose they are; 0: nobody's in particular
    tenant: Annotated[int, Meta(ge=0, lt=2**32)] = 0  # who has promised
    tool_chance: Chance = 1.0  # the same two, if the answer ends with a tool call
    tool_s: Time = 0.0
    is_promised: bool = True  # still_s; False: it was learned

    @property
    def after_tool_call(self) -> "Keep":
        """What holds if it does. A wait is learned if the client has promised none."""
        return Keep(
            self.tool_chance,
            max(self.still_s, self.tool_s),
            self.session,
            self.tenant,
            is_promised=self.is_promised and (self.still_s > 0 or not self.tool_s > 0),
        )


KEEP = Keep()


def over(session: int) -> Keep:
    """Of a session that has ended, however its answer ends."""
    return Keep(0.0, session=session, tool_chance=0.0)


class SessionTurn(NamedTuple):
    """A prompt as one turn of a conversation."""

    end: Block  # the prompt's last reusable block; NO_BLOCK: it has none
    session: Session
    number: Annotated[int, Meta(ge=1, le=MOST_TURNS)]
    before: Block = NO_BLOCK  # the end of the turn before
    is_named: bool = False  # its client has named the session
    is_last: bool = False  # as its client says
