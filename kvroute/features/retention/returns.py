"""Predicts which conversations will continue, from how often earlier ones did.

A turn returns if another turn continues it. Turns are divided into a few kinds, and the router
counts how many turns of each kind return. A replica evicts the blocks of kinds that seldom return
before others.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from kvroute.contract.keep import EVICTION_REASONS, Order, RetentionHint, SessionTurn
from kvroute.features.placing_feature import PlacingFeature

if TYPE_CHECKING:
    from kvroute.contract.generation import GenerateRequest
    from kvroute.router.placement.attempts import Attempt, RequestContext

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
BATCH_SESSION = 1  # session of the blocks that only batch requests have used


def kind_of(turn: SessionTurn) -> int:
    """Return the kind of a turn: an index in the lists of TurnCounts."""
    if turn.is_last:
        return ENDED
    return BUCKETS * turn.has_tools + bisect_left(LAST_TURNS, turn.number)


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


class Returns(PlacingFeature):
    """Tells replicas when to evict the blocks of prompts. A replay uses it, too."""

    name = "retention"

    def __init__(self) -> None:
        self.counts = TurnCounts()

    @property
    def trusts_ends(self) -> bool:
        """Return whether nearly all sessions that clients ended have indeed not continued."""
        return self.counts.order(ENDED) == Order.ENDED

    def recognised(
        self, context: "RequestContext", turn: SessionTurn, earlier: SessionTurn | None
    ) -> "RequestContext":
        order, lost = self.counts.order(kind_of(turn)), Order.USUAL
        if context.hints.is_promised and not turn.is_last:
            order = Order.USUAL
        if earlier is not None:
            lost = self.counts.order(kind_of(earlier))
        keep = RetentionHint(order, turn.session)
        return replace(context, keep=keep, evicted_why=EVICTION_REASONS[lost])

    def sending(self, request: "GenerateRequest", attempt: "Attempt") -> "GenerateRequest":
        context = attempt.context
        keep, turn = context.keep, context.turn
        if keep is not None and turn is not None and context.is_in_lane:
            if turn.is_named:  # further turns may follow, so blocks of ended sessions go first
                keep = RetentionHint(min(keep.order, Order.UNLIKELY), keep.session)
            else:
                keep = RetentionHint(Order.ENDED, BATCH_SESSION)
        return replace(request, keep=keep)

    def turn_began(self, turn: SessionTurn, earlier: SessionTurn | None) -> None:
        if earlier is not None:
            self.counts.returned[kind_of(earlier)] += 1.0
        self.counts.send(kind_of(turn))

    def session_ended(self, session: int, last: SessionTurn | None) -> None:
        if last is not None:
            self.counts.end(kind_of(last))
