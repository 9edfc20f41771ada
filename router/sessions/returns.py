"""How likely a conversation goes on, and how soon: learned from those that did.

A router sees a turn come back whether or not its blocks are still cached; an engine forgets what it
evicts. A conversation is recognised by the last block of its latest prompt, which the next prompt
contains. Arithmetic only: no clocks, no sockets.
"""

import math
import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add
from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec
from msgspec import Meta, Struct, field

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import MOST_TURNS, NO_BLOCK, SESSION_BITS, Keep, SessionTurn

Why = Literal["ended", "unlikely", "usual", "promised"]  # why a turn's blocks may be gone
WHYS: tuple[Why, ...] = get_args(Why)
ENDS = 50_000  # turns that are remembered
LOOK_BACK = 256  # blocks of an answer that may lie between a prompt's end and the next one's
HALF_LIFE_S = 900.0  # of what was learned
DECAY_S = HALF_LIFE_S / 15  # between two steps of the decay
READ_S = 1.0  # between two looks at the counts: each takes as long as all else here
DOUBT = 20.0  # turns' worth of belief that a kind is like all others
TURNS = (1, 2, 4)  # the last number of a turn in each kind; further ones are of the last kind
BUCKETS = len(TURNS) + 1
ENDED = 2 * BUCKETS  # the kind of turns that are the last ones, as their clients say
KINDS = ENDED + 1  # before it: of each bucket, answers that end with a tool call, and others
SHARPNESS = 0.75  # of chances; 1 is right where returns become as rare as 1 / time
WRONG = 0.1  # the share of told ends that may be wrong; beyond it they are one more kind of turn
UNLIKELY = 0.5  # a chance below it
GAPS_S = tuple(0.5 * 2.0**i for i in range(14))  # upper bounds; the last one is above an hour
SOON = 0.65  # the share of tool calls' results that come within the time for which they are kept
SURE = 0.5  # of such turns; if fewer come back, a tool call says nothing

Count = Annotated[float, Meta(ge=0, le=1e12)]
Turns = Annotated[list[Count], Meta(min_length=KINDS, max_length=KINDS)]
Gaps = Annotated[list[Count], Meta(min_length=len(GAPS_S), max_length=len(GAPS_S))]


class Said(NamedTuple):
    """What a request's client says of its conversation."""

    session: int = 0  # a number for the session's id; 0: none was given
    is_end: bool = False  # no further turn will come
    promise_s: float = 0.0  # within which one will come
    tenant: int = 0  # a number for whom it belongs to


NOTHING_SAID = Said()


class Retention(NamedTuple):
    """What follows for a prompt's blocks."""

    turn: SessionTurn
    keep: Keep
    lost: Why = "usual"  # why blocks of the turn before are gone, if they are


@dataclass(slots=True)
class _End:
    """A turn that may come back."""

    turn: SessionTurn
    keep: Keep
    at_s: float  # when it was sent; once it is answered, when that was
    replica_id: str = ""  # where it was sent
    is_answered: bool = False
    is_tool_call: bool = False
    is_ended: bool = False  # its client has said so since
    faded_s: float = 0.0  # for which the counts had faded when it was counted

    @property
    def kind(self) -> int:
        if self.turn.is_last or self.is_ended:
            return ENDED
        return _kind(self.turn.number, is_tool_call=self.is_tool_call)

    def lost(self, now_s: float) -> Why:
        """Why its blocks are gone, should they be."""
        if self.keep.chance <= 0 or self.is_ended:
            return "ended"
        if now_s - self.at_s < self.keep.still_s:
            return "promised"
        chance = self.keep.tool_chance if self.is_tool_call else self.keep.chance
        return "unlikely" if chance < UNLIKELY else "usual"


class Counts(Struct):
    """What was learned: turns of each kind, the older ones counting less."""

    sent: Turns = field(default_factory=lambda: [0.0] * KINDS)
    returned: Turns = field(default_factory=lambda: [0.0] * KINDS)
    gaps: Gaps = field(default_factory=lambda: [0.0] * len(GAPS_S))  # after tool calls

    def add(self, other: "Counts") -> None:
        self.sent = [*map(add, self.sent, other.sent)]
        self.returned = [*map(add, self.returned, other.returned)]
        self.gaps = [*map(add, self.gaps, other.gaps)]

    def decay(self, factor: float) -> None:
        self.sent = [factor * count for count in self.sent]
        self.returned = [factor * count for count in self.returned]
        self.gaps = [factor * count for count in self.gaps]

    def shares(self) -> list[float]:
        """Of each kind but told ends, how many such turns come back."""
        mean = (1.0 + sum(self.returned[:ENDED])) / (2.0 + sum(self.sent[:ENDED]))
        return [
            (returned + DOUBT * mean) / (sent + DOUBT)
            for sent, returned in zip(self.sent[:ENDED], self.returned[:ENDED], strict=True)
        ]

    def chances(self) -> list[float]:
        """Of each kind, that such a turn comes back, over the likeliest kind's. Of told ends it is
        0 while these are nearly always right."""
        shares = self.shares()
        wrong = self.returned[ENDED] / (self.sent[ENDED] + DOUBT)
        most = max(shares)
        shares.append(wrong if wrong > WRONG else 0.0)
        return [min(1.0, share / most) ** SHARPNESS for share in shares]

    @property
    def tool_s(self) -> float:
        """For how long a tool call is waited for; 0: not at all."""
        if sum(self.returned[BUCKETS:ENDED]) < SURE * sum(self.sent[BUCKETS:ENDED]):
            return 0.0
        wanted = SOON * sum(self.gaps)
        for limit_s, count in zip(GAPS_S, self.gaps, strict=True):
            wanted -= count
            if wanted < 0:
                return limit_s
        return 0.0


encode_counts = msgspec.msgpack.Encoder().encode
decode_counts = msgspec.msgpack.Decoder(Counts).decode  # raises one of DECODE_ERRORS


class Returns:
    """The conversations of all routers, as one of them knows them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.counts = Counts()
        self._rng = rng or random.Random()  # for numbers of sessions without a name
        self._ends: OrderedDict[Fingerprint, _End] = OrderedDict()
        self._sessions: OrderedDict[int, Fingerprint] = OrderedDict()  # named ones: latest end
        self._decayed_s: float | None = None
        self._faded_s = 0.0  # for which the counts have faded
        self._chances, self._tool_s = self.counts.chances(), 0.0
        self._read_s = -math.inf  # when the counts said so

    def __len__(self) -> int:
        return len(self._ends)

    def retention(
        self,
        chain: Sequence[Fingerprint],
        known_blocks: int,
        said: Said,
        now_s: float,
        shared_blocks: int = 0,
    ) -> Retention:
        """For a prompt with these reusable blocks, the first of which were seen before. What lies
        in shared_blocks is everybody's: no conversation goes on from there."""
        end = chain[-1] if chain else NO_BLOCK
        before = self._before(chain, known_blocks, said.session, shared_blocks)
        earlier = self._ends.get(before)
        turn = SessionTurn(
            end,
            said.session or self._session_after(earlier, end),
            _number_after(earlier, end),
            before,
            is_named=said.session != 0,
            is_last=said.is_end,
        )
        lost = earlier.lost(now_s) if earlier else "usual"
        return Retention(turn, self._keep(turn, said, now_s), lost)

    def begin(self, turn: SessionTurn, keep: Keep, now_s: float, replica_id: str = "") -> None:
        """The turn is sent, by this router or by another. A second call does nothing."""
        self._decay(now_s)
        if turn.end == NO_BLOCK:
            return
        if same := self._same(turn):
            same.replica_id = replica_id  # the first one had no room, or was lost
            return
        if earlier := self._ends.pop(turn.before, None):
            self._count_return(earlier, now_s)
        self._ends[turn.end] = end = _End(turn, keep, now_s, replica_id)
        self._count(end)
        self._ends.move_to_end(turn.end)
        _bound(self._ends, ENDS)
        if turn.is_named:
            self._sessions[turn.session] = turn.end
            self._sessions.move_to_end(turn.session)
            _bound(self._sessions, ENDS)

    def finish(self, turn: SessionTurn, *, is_tool_call: bool, now_s: float) -> None:
        """Its answer has ended. A second call does nothing."""
        end = self._same(turn)
        if end is None or end.is_answered:
            return
        self._uncount(end)
        end.at_s, end.is_answered, end.is_tool_call = now_s, True, is_tool_call
        self._count(end)

    def home(self, session: int) -> str:
        """The replica that has a named session's latest turn; empty: unknown."""
        turn = self._ends.get(self._sessions.get(session, NO_BLOCK)) if session else None
        return turn.replica_id if turn else ""

    def knows(self, turn: SessionTurn) -> bool:
        """Whether it was sent."""
        return self._same(turn) is not None

    @property
    def believes_ends(self) -> bool:
        """Told ends are nearly always right."""
        return self.counts.chances()[ENDED] == 0.0

    def end(self, session: int) -> None:
        """Its client says that no further turn will come."""
        if last := self._ends.get(self._sessions.get(session, NO_BLOCK)):
            self._uncount(last)
            last.is_ended = True
            self._count(last)

    def _same(self, turn: SessionTurn) -> _End | None:
        end = self._ends.get(turn.end)
        return end if end and end.turn == turn else None

    def _session_after(self, earlier: _End | None, end: Fingerprint) -> int:
        """Equal prompts may be of different people, and a name is its client's."""
        if earlier is None or earlier.turn.is_named or earlier.turn.end == end:
            return self._rng.getrandbits(SESSION_BITS) or 1
        return earlier.turn.session

    def _before(
        self, chain: Sequence[Fingerprint], known_blocks: int, session: int, shared_blocks: int
    ) -> Fingerprint:
        """The end of the latest turn that this one continues; NO_BLOCK: it continues none."""
        end = self._sessions.get(session, NO_BLOCK) if session else NO_BLOCK
        if end in self._ends and end in chain:  # agents name one session for several conversations
            return end
        known = min(known_blocks, len(chain))
        for place in range(known - 1, max(shared_blocks, known - LOOK_BACK) - 1, -1):
            if chain[place] in self._ends:
                return chain[place]
        return NO_BLOCK

    def _keep(self, turn: SessionTurn, said: Said, now_s: float) -> Keep:
        self._read(now_s)
        chances = self._chances
        if said.is_end:
            return Keep(chances[ENDED], 0.0, turn.session, said.tenant, chances[ENDED])
        return Keep(
            chances[_kind(turn.number, is_tool_call=False)],
            said.promise_s,
            turn.session,
            said.tenant,
            chances[_kind(turn.number, is_tool_call=True)],
            self._tool_s,
        )

    def _read(self, now_s: float) -> None:
        if now_s - self._read_s < READ_S:
            return
        self._read_s = now_s
        self._chances, self._tool_s = self.counts.chances(), self.counts.tool_s

    def _count(self, end: _End) -> None:
        self.counts.sent[end.kind] += 1.0
        end.faded_s = self._faded_s

    def _uncount(self, end: _End) -> None:
        """What is left of it: an end may be told hours after its turn."""
        sent, left = self.counts.sent, 0.5 ** ((self._faded_s - end.faded_s) / HALF_LIFE_S)
        sent[end.kind] = max(0.0, sent[end.kind] - left)

    def _count_return(self, earlier: _End, now_s: float) -> None:
        self.counts.returned[earlier.kind] += 1.0
        if BUCKETS <= earlier.kind < ENDED:
            gap_s = now_s - earlier.at_s
            self.counts.gaps[min(bisect_left(GAPS_S, gap_s), len(GAPS_S) - 1)] += 1.0

    def _decay(self, now_s: float) -> None:
        if self._decayed_s is None:
            self._decayed_s = now_s
        since_s = now_s - self._decayed_s
        if since_s > DECAY_S:
            self.counts.decay(0.5 ** (since_s / HALF_LIFE_S))
            self._faded_s += since_s
            self._decayed_s = now_s


def _kind(number: int, *, is_tool_call: bool) -> int:
    return BUCKETS * is_tool_call + bisect_left(TURNS, number)


def _number_after(earlier: _End | None, end: Fingerprint) -> int:
    if earlier is None:
        return 1
    return min(MOST_TURNS, earlier.turn.number + (earlier.turn.end != end))


def _bound(table: OrderedDict[Any, Any], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
