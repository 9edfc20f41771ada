"""Predicts which conversations will continue, from how often earlier ones did.

A turn of a conversation returns if a later prompt continues it. A router sees this even if the
turn's blocks are no longer cached; an engine forgets the blocks that it evicts. A conversation is
recognised by the last block of its latest prompt, which the next prompt contains. Turns are divided
into a few kinds, and the router counts how many turns of each kind return. This module only
computes: it does not use the clock or the network.
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

# Reasons for which a turn's blocks may have been evicted. `ended`: the client ended the session.
# `unlikely`: turns of this kind seldom return. `usual`: ordinary eviction.
EvictionReason = Literal["ended", "unlikely", "usual"]
EVICTION_REASONS: tuple[EvictionReason, ...] = get_args(EvictionReason)
MAX_ENDS = 50_000  # turns that the router remembers
# Blocks of a prompt that are searched for the end of the earlier turn. The answer to that turn
# follows its end, and may have this many blocks.
MAX_ANSWER_BLOCKS = 256
MAX_COUNTED = 20_000  # counted turns at which all counts are halved, so that old turns count less
# Weight, in turns, of the prior assumption that each kind of turns returns as often as the mean.
PRIOR_TURNS = 20.0
# Last turn number of each kind but the last one: turn 1, turn 2, turns 3 and 4, all later turns.
LAST_TURNS = (1, 2, 4)
BUCKETS = len(LAST_TURNS) + 1  # kinds by the turn's number
ENDED = 2 * BUCKETS  # kind of the turns that are the last ones, according to the client
KINDS = ENDED + 1  # number of kinds: BUCKETS without tools, BUCKETS with tools, and ENDED
# A kind is unlikely to return if its share of returned turns is less than this part of the largest
# share of any kind.
UNLIKELY = 0.4
# If a larger share of the sessions that clients have ended continues, the blocks of ended sessions
# are no longer evicted first.
MAX_WRONG_ENDS = 0.1


class SessionHints(NamedTuple):
    """What a client's request says about its conversation."""

    session: int = 0  # hash of the session id; 0 if the client sent none
    is_end: bool = False  # the client says that this is the last turn
    is_promised: bool = False  # the client says that a further turn will follow
    has_tools: bool = False  # the request defines tools that the model may call
    tenant: int = 0  # hash of the tenant; 0 if there is none


NO_HINTS = SessionHints()


class Retention(NamedTuple):
    """What the router tells a replica about keeping a prompt's blocks."""

    turn: SessionTurn
    keep: RetentionHint
    # Why the previous turn's blocks were evicted, in case they were.
    lost: EvictionReason = "usual"


@dataclass(slots=True)
class _End:
    """A turn that may return."""

    turn: SessionTurn
    kind: int  # index in TurnCounts


@dataclass
class TurnCounts:
    """Numbers of turns by kind: turns that were sent, and turns that returned."""

    sent: list[float] = field(default_factory=lambda: [0.0] * KINDS)
    returned: list[float] = field(default_factory=lambda: [0.0] * KINDS)

    def send(self, kind: int) -> None:
        """Count a turn."""
        self.sent[kind] += 1.0
        if sum(self.sent) > MAX_COUNTED:
            self.sent = [0.5 * count for count in self.sent]
            self.returned = [0.5 * count for count in self.returned]

    def end(self, kind: int) -> None:
        """Move a counted turn to the kind ENDED, because its client has ended the session."""
        self.sent[kind] = max(0.0, self.sent[kind] - 1.0)
        self.sent[ENDED] += 1.0

    def order(self, kind: int) -> Order:
        """Return the eviction order of blocks of this kind of turn."""
        if kind == ENDED:
            wrong = self.returned[ENDED] / (self.sent[ENDED] + PRIOR_TURNS)
            return Order.UNLIKELY if wrong > MAX_WRONG_ENDS else Order.ENDED
        shares = self._shares()
        return Order.UNLIKELY if shares[kind] < UNLIKELY * max(shares) else Order.USUAL

    def _shares(self) -> list[float]:
        """Return the estimated share of turns that return, for each kind but ENDED."""
        mean = (1.0 + sum(self.returned[:ENDED])) / (2.0 + sum(self.sent[:ENDED]))
        return [
            (returned + PRIOR_TURNS * mean) / (sent + PRIOR_TURNS)
            for sent, returned in zip(self.sent[:ENDED], self.returned[:ENDED], strict=True)
        ]


class Returns:
    """The conversations that may continue, of all routers as far as this router knows them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self.counts = TurnCounts()
        self._rng = rng or random.Random()  # makes numbers for sessions without an id
        self._ends: OrderedDict[Fingerprint, _End] = OrderedDict()  # last block -> its turn
        # Hash of the session id that a client sent -> last block of the session's latest turn.
        self._sessions: OrderedDict[int, Fingerprint] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def retention(
        self,
        chain: Sequence[Fingerprint],
        known_blocks: int,
        hints: SessionHints,
        shared_blocks: int = 0,
    ) -> Retention:
        """Return how a replica should keep a prompt's blocks.

        Args:
            chain: the prompt's reusable blocks.
            known_blocks: leading blocks of the chain that some replica has or had cached.
            hints: what the client says about its conversation.
            shared_blocks: leading blocks that all namespaces share, such as a system prompt. These
                do not identify a conversation.
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
        """Record a turn that this router or another one sends. A second call has no effect."""
        if turn.end == NO_BLOCK or self.knows(turn):
            return
        if earlier := self._ends.pop(turn.before, None):
            self.counts.returned[earlier.kind] += 1.0
        kind = _kind(turn)
        self._ends[turn.end] = _End(turn, kind)
        self.counts.send(kind)
        self._ends.move_to_end(turn.end)
        _bound(self._ends, MAX_ENDS)
        if turn.is_named:
            self._sessions[turn.session] = turn.end
            self._sessions.move_to_end(turn.session)
            _bound(self._sessions, MAX_ENDS)

    def knows(self, turn: SessionTurn) -> bool:
        """Return whether `begin` has recorded the turn."""
        end = self._ends.get(turn.end)
        return end is not None and end.turn == turn

    @property
    def trusts_ends(self) -> bool:
        """Return whether nearly all sessions that clients ended have indeed not continued."""
        return self.counts.order(ENDED) == Order.ENDED

    def end(self, session: int) -> None:
        """Record that a client has ended a session."""
        last = self._ends.get(self._sessions.get(session, NO_BLOCK))
        if last and last.kind != ENDED:
            self.counts.end(last.kind)
            last.kind = ENDED

    def _session_after(self, earlier: _End | None, end: Fingerprint) -> int:
        """Return the number of a session without an id: that of the earlier turn, or a new one.

        A repeated prompt gets a new number, because it may come from another user. A turn that
        continues a session with an id gets a new number, because only the client may use its id.
        """
        if earlier is None or earlier.turn.is_named or earlier.turn.end == end:
            return self._rng.getrandbits(SESSION_BITS) or 1
        return earlier.turn.session

    def _before(
        self, chain: Sequence[Fingerprint], known_blocks: int, session: int, shared_blocks: int
    ) -> Fingerprint:
        """Return the last block of the turn that a prompt continues; NO_BLOCK if there is none."""
        end = self._sessions.get(session, NO_BLOCK) if session else NO_BLOCK
        if end in self._ends and end in chain:  # agents use one id for several conversations
            return end
        end_index = min(known_blocks, len(chain))
        first = max(shared_blocks, end_index - MAX_ANSWER_BLOCKS)
        for index in range(end_index - 1, first - 1, -1):
            if chain[index] in self._ends:
                return chain[index]
        return NO_BLOCK

    def _lost(self, earlier: _End | None) -> EvictionReason:
        """Return the reason of the eviction, if the turn's blocks were evicted."""
        match self.counts.order(earlier.kind) if earlier else Order.USUAL:
            case Order.ENDED:
                return "ended"
            case Order.UNLIKELY:
                return "unlikely"
        return "usual"


def _kind(turn: SessionTurn) -> int:
    return (
        ENDED if turn.is_last else BUCKETS * turn.has_tools + bisect_left(LAST_TURNS, turn.number)
    )


def _number_after(earlier: _End | None, end: Fingerprint) -> int:
    if earlier is None:
        return 1
    return min(MAX_TURNS, earlier.turn.number + (earlier.turn.end != end))


def _bound(table: OrderedDict[Any, Any], size: int) -> None:
    while len(table) > size:
        table.popitem(last=False)
