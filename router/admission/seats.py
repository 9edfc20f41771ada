"""Limits how many sessions are active while their contexts do not fit in the fleet's caches.

When the active sessions need more KV cache than the fleet has, each turn finds that other sessions
have evicted its blocks, and the replicas compute the same contexts again and again. Fewer active
sessions then complete more turns. So a session sends requests only while it holds a seat, and all
seats together take at most CACHE_SHARE of the fleet's cache.

Nothing is limited before two things come together: the contexts exceed the cache, and the replicas
are all busy while they compute more of what was evicted than of what is new. The limit is then in
force until the contexts of all active sessions fit.

The first prompt of a conversation needs no seat: it may be the only one. Sessions wait in the order
in which they came. With several tenants, the one whose seats take the fewest tokens comes first. A
session loses its seat when it has sent nothing for IDLE_S, or when its client ends it.

Arithmetic only: the caller passes the time, in seconds of any monotonic clock.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.contract.messages import WaitingSessions

CACHE_SHARE = 0.9  # share of the fleet's KV cache for seats; .7 and 1.1 served a sixth fewer turns
MIN_PRESSURE = 1.0  # evicted tokens that are computed again for each new token
MIN_BUSY = 0.5  # share of recent requests that found every replica busy
BUSY_WEIGHT = 0.01  # weight of the latest request in that share
IDLE_S = 60.0  # a session that has sent nothing for so long is not active; 30 s served a sixth less
MAX_SESSIONS = 50_000  # bound of the active sessions and of the stored shared prefixes
MAX_CONTEXTS = 64  # conversations of one session whose tokens count, the latest ones
INTERVAL_WEIGHT = 0.1  # weight of the latest interval between two seats in the mean
PATIENCE_S = 1.0  # another router's session comes first for so long while there is room

R = TypeVar("R")


@dataclass(slots=True)
class ActiveSession:
    """An active session."""

    tenant: int
    used_s: float  # when its latest request was sent or ended
    shared_tokens: int = 0  # tokens at the start of its prompts that other sessions use, too
    running: int = 0  # number of its requests that wait for a seat or have not ended
    seated_s: float | None = None  # since when it holds a seat; None: it holds none
    tokens: int = 0  # tokens of its contexts together, without the shared ones
    contexts: OrderedDict[Fingerprint, int] = field(
        default_factory=OrderedDict
    )  # last block -> tokens

    def turn(self, turn: SessionTurn, tokens: int) -> None:
        """Replace the context that this turn continues by its own, of that many tokens."""
        for block in (turn.before, turn.end):
            self.tokens -= self.contexts.pop(block, 0)
        self.contexts[turn.end] = max(0, tokens - self.shared_tokens)
        self.tokens += self.contexts[turn.end]
        while len(self.contexts) > MAX_CONTEXTS:
            self.tokens -= self.contexts.popitem(last=False)[1]


@dataclass(slots=True, eq=False)
class Waiter(Generic[R]):
    """A request whose session may need a seat."""

    request: R
    turn: SessionTurn
    tokens: int  # prompt tokens
    tenant: int
    arrived_s: float

    @property
    def session(self) -> int:
        """Return the number of its session."""
        return self.turn.session


@dataclass(frozen=True, slots=True)
class SeatState:
    """What operators see of the seats."""

    is_limited: bool
    most: int | None  # seats, where the operator has set a number
    sessions: int  # number of active sessions
    tokens: int  # tokens of their contexts
    seats: int
    seat_tokens: int  # context tokens of the sessions that hold seats
    limit_tokens: int  # context tokens that these sessions may have together
    waiting: int  # requests without a seat, in this router
    oldest_s: float  # how long the first of them has waited
    all_waiting: int  # requests without a seat, in all routers
    all_oldest_s: float  # how long the first of those has waited


class Seats(Generic[R]):
    """One router's view of the sessions of all routers, and its own requests that wait for a seat.

    Args:
        capacity_tokens: returns the size of the fleet's KV cache.
        most: the number of seats; None: as many as fit in the cache, while it is too small.
    """

    def __init__(self, capacity_tokens: Callable[[], int], most: int | None = None) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._capacity_tokens = capacity_tokens
        self._most = most
        self._is_limited = most is not None
        self._active = OrderedDict[int, ActiveSession]()  # the one idle for the longest first
        self._shared = OrderedDict[int, int]()  # session -> tokens of its shared prefix
        self._starts = OrderedDict[Fingerprint, None]()  # last blocks with which sessions began
        self._tokens = 0  # tokens of all active sessions
        self._seats = 0
        self._seat_tokens = Counter[int]()  # tenant -> its seats
        self._busy_share = 0.0
        self._pressure = 0.0
        self._waiting: dict[int, deque[Waiter[R]]] = defaultdict(deque)  # tenant -> waiting
        self._elsewhere: dict[
            str, tuple[int, float]
        ] = {}  # router -> number of waiting requests, first arrival
        self._has_new_seats = False  # since the waiting requests were looked through
        self._blocked_s = math.inf  # since when there is room and another router's session is first
        self._granted_s = 0.0  # when a waiting session last got a seat, or the first began to wait
        self._interval_s = 0.0  # mean time between two of these; 0: unknown

    def __len__(self) -> int:
        return sum(map(len, [*self._waiting.values()]))

    def __iter__(self) -> Iterator[Waiter[R]]:
        for waiters in self._waiting.values():
            yield from waiters

    # The requests of all routers.

    def observe(self, *, is_busy: bool, pressure: float) -> None:
        """Record whether a new request found every replica busy, and how tight the caches are."""
        self._busy_share += BUSY_WEIGHT * (is_busy - self._busy_share)
        self._pressure = pressure

    def sent(
        self,
        turn: SessionTurn,
        tokens: int,
        *,
        tenant: int,
        known: tuple[Fingerprint, int],
        now_s: float,
    ) -> None:
        """Record that a router has sent a request of a session.

        Args:
            tokens: of its prompt.
            known: the last block of the part that some replica had cached, and its tokens.
        """
        self._drop_idle(now_s)
        session = self._active.get(turn.session)
        if session is None:
            shared = self._shared_tokens(turn, *known)
            session = self._active[turn.session] = ActiveSession(tenant, now_s, shared)
        before = session.tokens
        session.turn(turn, tokens)
        self._count(session, session.tokens - before)
        session.running += 1
        self._use(turn.session, session, now_s)
        if turn.number > 1 and session.seated_s is None:
            self._seat(session, now_s)

    def ended(self, session: int, now_s: float) -> None:
        """Record that a request of the session has ended."""
        if found := self._active.get(session):
            found.running = max(0, found.running - 1)
            self._use(session, found, now_s)

    def session_ended(self, session: int) -> None:
        """Take back the seat of a session that its client has ended."""
        if session in self._active:
            self._drop(session)

    # Requests of this router.

    def is_free(self, waiter: Waiter[R], now_s: float) -> bool:
        """Return whether a new request may go on at once."""
        self._update(now_s)
        if not self._is_limited or waiter.turn.number == 1:
            return True
        session = self._active.get(waiter.session)
        if session and session.seated_s is not None:
            return True
        if self._waiting or self._elsewhere or not self._has_room(waiter):
            return False
        self._reserve(waiter, now_s)
        return True

    def add(self, waiter: Waiter[R]) -> None:
        """Let a request wait for a seat. Its session is active meanwhile."""
        self._session_of(waiter, waiter.arrived_s).running += 1
        if not self._waiting:
            self._granted_s = waiter.arrived_s
        self._waiting[waiter.tenant].append(waiter)
        self.on_change()

    def remove(self, waiter: Waiter[R]) -> bool:
        """Return whether the request waited; it does no longer."""
        waiters = self._waiting.get(waiter.tenant)
        if not waiters or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.tenant]
        if session := self._active.get(waiter.session):
            session.running = max(0, session.running - 1)
        self.on_change()
        return True

    def due(self, now_s: float) -> Waiter[R] | None:
        """Return a request that may go on now, and no longer waits; None: there is none."""
        if not self._waiting:
            return None
        self._update(now_s)
        waiter = self._next(now_s)
        if waiter is not None:
            self.remove(waiter)
        return waiter

    def forecast_s(self, waiter: Waiter[R]) -> float:
        """Return how long a new request would wait for a seat; 0 while that is unknown."""
        return (len(self) + self._waiting_elsewhere() + 1) * self._interval_s

    def _waiting_elsewhere(self) -> int:
        return sum(count for count, _ in [*self._elsewhere.values()])

    def state(self, now_s: float) -> SeatState:
        """Return what operators see. Another thread may ask."""
        arrivals_s = [waiters[0].arrived_s for waiters in [*self._waiting.values()] if waiters]
        elsewhere_s = [arrived_s for _, arrived_s in [*self._elsewhere.values()]]
        return SeatState(
            self._is_limited,
            self._most,
            len(self._active),
            self._tokens,
            self._seats,
            self._seat_tokens.total(),
            self._limit_tokens(),
            len(self),
            now_s - min(arrivals_s, default=now_s),
            len(self) + self._waiting_elsewhere(),
            now_s - min([*arrivals_s, *elsewhere_s], default=now_s),
        )

    # The other routers.

    def report(self, now_s: float) -> WaitingSessions:
        """Return what other routers need to know of the requests that wait here."""
        arrivals_s = [waiters[0].arrived_s for waiters in self._waiting.values()]
        oldest_s = max(0.0, now_s - min(arrivals_s)) if arrivals_s else 0.0
        return WaitingSessions(len(self), oldest_s)

    def receive(self, router: str, waiting: WaitingSessions, now_s: float) -> None:
        """Take over what another router has reported just now."""
        if waiting.requests:
            self._elsewhere[router] = (waiting.requests, now_s - waiting.oldest_s)
        else:
            self.forget(router)

    def forget(self, router: str) -> None:
        """Forget a router that is gone, or where nothing waits."""
        self._elsewhere.pop(router, None)

    # How many seats there are.

    def _drop_idle(self, now_s: float) -> None:
        """Take back the seats of idle sessions, and of the oldest where there are too many."""
        while len(self._active) > MAX_SESSIONS:
            self._drop(next(iter(self._active)))
        while self._active:
            number, session = next(iter(self._active.items()))
            if now_s - session.used_s < IDLE_S:
                break
            if session.running:
                self._use(number, session, now_s)
            else:
                self._drop(number)

    def _update(self, now_s: float) -> None:
        """Forget idle sessions; begin or end the limit."""
        self._drop_idle(now_s)
        if self._most is not None:
            return
        fits = self._tokens <= self._limit_tokens()
        if self._is_limited:
            self._is_limited = not fits
        elif not fits and self._pressure >= MIN_PRESSURE and self._busy_share >= MIN_BUSY:
            self._is_limited = True
            self._take_back(now_s)

    def _take_back(self, now_s: float) -> None:
        """Take seats from the sessions that got theirs last until the others fit."""
        seated = [each for each in self._active.values() if each.seated_s is not None]
        for session in sorted(seated, key=lambda each: each.seated_s or 0.0, reverse=True):
            if self._seat_tokens.total() <= self._limit_tokens():
                break
            self._unseat(session)

    def _limit_tokens(self) -> int:
        return int(CACHE_SHARE * self._capacity_tokens())

    def _has_room(self, waiter: Waiter[R]) -> bool:
        """Return whether its session can get a seat. One that exceeds the cache alone can, too."""
        if self._most is not None:
            return self._seats < self._most
        tokens = self._needed_tokens(waiter)
        return not self._seats or self._seat_tokens.total() + tokens <= self._limit_tokens()

    def _needed_tokens(self, waiter: Waiter[R]) -> int:
        session = self._active.get(waiter.session)
        shared = session.shared_tokens if session else self._shared.get(waiter.session, 0)
        return max(waiter.tokens - shared, session.tokens if session else 0)

    def _reserve(self, waiter: Waiter[R], now_s: float) -> None:
        """Give its session a seat before the request is sent: it may have to wait for a replica."""
        self._seat(self._session_of(waiter, now_s), now_s)

    def _session_of(self, waiter: Waiter[R], now_s: float) -> ActiveSession:
        """Return the active session of a request, with the tokens that it will need."""
        session = self._active.get(waiter.session)
        if session is None:
            shared = self._shared.get(waiter.session, 0)
            session = self._active[waiter.session] = ActiveSession(waiter.tenant, now_s, shared)
        context = max(0, waiter.tokens - session.shared_tokens - session.tokens)
        session.contexts[waiter.turn.end] = session.contexts.get(waiter.turn.end, 0) + context
        session.tokens += context
        self._count(session, context)
        self._use(waiter.session, session, now_s)
        return session

    def _next(self, now_s: float) -> Waiter[R] | None:
        first = min(
            (waiters[0] for waiters in self._waiting.values()),
            key=lambda each: (self._seat_tokens[each.tenant], each.arrived_s),
        )
        if not self._is_limited:
            return first
        if self._has_new_seats:  # a seat is the session's, whichever of its requests got it
            for waiter in self:
                session = self._active.get(waiter.session)
                if session and session.seated_s is not None:
                    return waiter
            self._has_new_seats = False
        if not self._has_room(first):
            self._blocked_s = math.inf
            return None
        if any(arrived_s < first.arrived_s for _, arrived_s in self._elsewhere.values()):
            self._blocked_s = min(self._blocked_s, now_s)
            if now_s - self._blocked_s < PATIENCE_S:
                return None
        self._blocked_s = math.inf
        self._granted(now_s)
        self._reserve(first, now_s)
        return first

    def _granted(self, now_s: float) -> None:
        """Record that a session which had waited gets a seat."""
        interval_s = now_s - self._granted_s
        share = INTERVAL_WEIGHT if self._interval_s else 1.0
        self._interval_s += share * (interval_s - self._interval_s)
        self._granted_s = now_s

    # Sums.

    def _use(self, number: int, session: ActiveSession, now_s: float) -> None:
        session.used_s = now_s
        self._active.move_to_end(number)

    def _shared_tokens(self, turn: SessionTurn, block: Fingerprint, tokens: int) -> int:
        """Return how many tokens at the start of a session's prompts other sessions use, too.

        These are the tokens that were cached before its first prompt, if another session has begun
        with them.
        """
        if turn.session not in self._shared:
            is_shared = turn.number == 1 and block in self._starts
            self._shared[turn.session] = tokens if is_shared else 0
        if turn.number == 1 and block != NO_BLOCK:
            self._starts[block] = None
        for table in (self._shared, self._starts):
            if len(table) > MAX_SESSIONS:
                table.popitem(last=False)
        return self._shared[turn.session]

    def _count(self, session: ActiveSession, tokens: int) -> None:
        self._tokens += tokens
        if session.seated_s is not None:
            self._seat_tokens[session.tenant] += tokens

    def _seat(self, session: ActiveSession, now_s: float) -> None:
        session.seated_s = now_s
        self._has_new_seats = True
        self._seats += 1
        self._seat_tokens[session.tenant] += session.tokens

    def _unseat(self, session: ActiveSession) -> None:
        session.seated_s = None
        self._seats -= 1
        self._seat_tokens[session.tenant] -= session.tokens
        if not self._seat_tokens[session.tenant]:
            del self._seat_tokens[session.tenant]

    def _drop(self, number: int) -> None:
        session = self._active.pop(number)
        if session.seated_s is not None:
            self._unseat(session)
        self._tokens -= session.tokens
