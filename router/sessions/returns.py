"""Predicts which conversations will continue, from how often earlier ones did.

A turn of a conversation comes back if a later prompt continues it. A router sees this whether or
not the turn's blocks are still cached; an engine forgets what it evicts. A conversation is
recognised by the last block of its latest prompt, which the next prompt contains. There are a few
kinds of turns, and a router counts how many turns of each kind come back. This module only
computes: it uses no clock and no socket.
"""

import random
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import (
    MAX_TURNS,
    NO_BLOCK,
    SESSION_BITS,
    Order,
    RetentionHint,
    SessionTurn,
)

Why = Literal["ended", "unlikely", "usual"]  # why a turn's blocks may be gone
WHYS: tuple[Why, ...] = get_args(Why)
ENDS = 50_000  # turns that are remembered
LOOK_BACK = 256  # blocks of an answer that may lie between a prompt's end and the next one's
MEMORY = 20_000  # when so many turns are counted, all counts are halved
DOUBT = 20.0  # prior weight in turns: each kind is first assumed to return like the mean
TURNS = (1, 2, 4)  # the last number of a turn in each kind; further ones are of the last kind
BUCKETS = len(TURNS) + 1
ENDED = 2 * BUCKETS  # the kind of turns that their clients declared to be the last
KINDS = ENDED + 1  # the kinds before ENDED: BUCKETS without tools, then BUCKETS with tools
UNLIKELY = 0.4  # kinds of turns below this share of the likeliest kind's returns are unlikely
WRONG = 0.1  # the share of ends that clients may get wrong and still be believed


class SessionHints(NamedTuple):
    """What a client's request says about its conversation."""

    session: int = 0  # a number for the session's id; 0: none was given
    is_end: bool = False  # no further turn will come
    is_promised: bool = False  # a further turn will come
    has_tools: bool = False  # the model may call tools
    tenant: int = 0  # a number for the tenant; 0: no tenant


NO_HINTS = SessionHints()


class Retention(NamedTuple):
    """How a replica is to keep a prompt's blocks."""

    turn: SessionTurn
    keep: RetentionHint
    lost: Why = "usual"  # why blocks of the turn before are gone, if they are


@dataclass(slots=True)
class _End:
    """A turn that may come back."""

    turn: SessionTurn
    kind: int


@dataclass
class TurnCounts:
    """Turns of each kind, and those of them that came back."""

    sent: list[float] = field(default_factory=lambda: [0.0] * KINDS)
    returned: list[float] = field(default_factory=lambda: [0.0] * KINDS)

    def send(self, kind: int) -> None:
        """Count a turn."""
        self.sent[kind] += 1.0
        if sum(self.sent) > MEMORY:
            self.sent = [0.5 * count for count in self.sent]
            self.returned = [0.5 * count for count in self.returned]

    def end(self, kind: int) -> None:
        """Move a counted turn to the kind ENDED: its client has ended the session since."""
        self.sent[kind] = max(0.0, self.sent[kind] - 1.0)
        self.sent[ENDED] += 1.0

    def order(self, kind: int) -> Order:
        """Return how soon blocks of such turns are evicted."""
        if kind == ENDED:
            wrong = self.returned[ENDED] / (self.sent[ENDED] + DOUBT)
            return Order.UNLIKELY if wrong > WRONG else Order.ENDED
        shares = self._shares()
        return Order.UNLIKELY if shares[kind] < UNLIKELY * max(shares) else Order.USUAL

    def _shares(self) -> list[float]:
        """Return the estimated share of turns that come back, for each kind but ENDED."""
        mean = (1.0 + sum(self.returned[:ENDED])) / (2.0 + sum(self.sent[:ENDED]))
        return [
            (returned + DOUBT * mean) / (sent + DOUBT)
            for sent, returned in zip(self.sent[:ENDED], self.returned[:ENDED], strict=True)
        ]


class Returns:
    """The conversations of all routers, as one of them knows them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.counts = TurnCounts()
        self._rng = rng or random.Random()  # makes numbers for sessions without a name
        self._ends: OrderedDict[Fingerprint, _End] = OrderedDict()
        self._sessions: OrderedDict[int, Fingerprint] = OrderedDict()  # named ones: latest end

    def __len__(self) -> int:
        return len(self._ends)

    def retention(
        self,
        chain: Sequence[Fingerprint],
        known_blocks: int,
        hints: SessionHints,
        shared_blocks: int = 0,
    ) -> Retention:
        """Return how a replica is to keep a prompt's blocks.

        Args:
            chain: the prompt's reusable blocks.
            known_blocks: how many of them were seen before.
            hints: what the client says about its conversation.
            shared_blocks: how many of them all namespaces share. No conversation is recognised by
                these.
        """
        end = chain[-1] if chain else NO_BLOCK
        before = self._before(chain, known_blocks, hints.session, shared_blocks)
        earlier = self._ends.get(before)
        turn = SessionTurn(
            end,
            hints.session or self._session_after(earlier, end),
            _number_after(earlier, end),
            before,
            is_named=hints.session != 0,
            is_last=hints.is_end,
            has_tools=hints.has_tools,
            tenant=hints.tenant,
        )
        order = self.counts.order(_kind(turn))
        if hints.is_promised and not hints.is_end:
            order = Order.USUAL
        return Retention(turn, RetentionHint(order, turn.session), self._lost(earlier))

    def begin(self, turn: SessionTurn) -> None:
        """Record that a turn is sent, by this router or by another. A second call does nothing."""
        if turn.end == NO_BLOCK or self.knows(turn):
            return
        if earlier := self._ends.pop(turn.before, None):
            self.counts.returned[earlier.kind] += 1.0
        kind = _kind(turn)
        self._ends[turn.end] = _End(turn, kind)
        self.counts.send(kind)
        self._ends.move_to_end(turn.end)
        _bound(self._ends, ENDS)
        if turn.is_named:
            self._sessions[turn.session] = turn.end
            self._sessions.move_to_end(turn.session)
            _bound(self._sessions, ENDS)

    def knows(self, turn: SessionTurn) -> bool:
        """Return whether the turn was sent."""
        end = self._ends.get(turn.end)
        return end is not None and end.turn == turn

    @property
    def believes_ends(self) -> bool:
        """Return whether clients' declarations of ends are nearly always right."""
        return self.counts.order(ENDED) == Order.ENDED

    def end(self, session: int) -> None:
        """Record that a client has ended a session: no further turn of it will come."""
        last = self._ends.get(self._sessions.get(session, NO_BLOCK))
        if last and last.kind != ENDED:
            self.counts.end(last.kind)
            last.kind = ENDED

    def _session_after(self, earlier: _End | None, end: Fingerprint) -> int:
        """Return the number of an unnamed session: the earlier turn's, or a new one.

        A repeated prompt gets a new number, because it may come from another person. So does a turn
        after a named session, because the name belongs to its client.
        """
        if earlier is None or earlier.turn.is_named or earlier.turn.end == end:
            return self._rng.getrandbits(SESSION_BITS) or 1
        return earlier.turn.session

    def _before(
        self, chain: Sequence[Fingerprint], known_blocks: int, session: int, shared_blocks: int
    ) -> Fingerprint:
        """Return the end of the turn that a prompt continues; NO_BLOCK: it continues none."""
        end = self._sessions.get(session, NO_BLOCK) if session else NO_BLOCK
        if end in self._ends and end in chain:  # agents name one session for several conversations
            return end
        known = min(known_blocks, len(chain))
        for place in range(known - 1, max(shared_blocks, known - LOOK_BACK) - 1, -1):
            if chain[place] in self._ends:
                return chain[place]
        return NO_BLOCK

    def _lost(self, earlier: _End | None) -> Why:
        """Return why blocks of a turn are gone, if they are."""
        match self.counts.order(earlier.kind) if earlier else Order.USUAL:
            case Order.ENDED:
                return "ended"
            case Order.UNLIKELY:
                return "unlikely"
        return "usual"


def _kind(turn: SessionTurn) -> int:
    return ENDED if turn.is_last else BUCKETS * turn.has_tools + bisect_left(TURNS, turn.number)


def _number_after(earlier: _End | None, end: Fingerprint) -> int:
    if earlier is None:
        return 1
    return min(MAX_TURNS, earlier.turn.number + (earlier.turn.end != end))


def _bound(table: OrderedDict[Any, Any], most: int) -> None:
    while len(table) > most:
        table.popitem(last=False)
