"""Limits the number of active sessions while their contexts do not fit in the fleet's caches.

If the active sessions need more KV cache than the fleet has, the turns of one session evict the
blocks of others, and the replicas compute the same contexts again and again. Fewer active sessions
then complete more turns. So a session must hold a seat, which is the permission to send requests.
The contexts of all sessions with seats may take CACHE_SHARE of the fleet's cache. A context is what
a conversation has in the cache: its latest prompt.

The limit starts if all of these conditions hold: the contexts exceed the cache, the replicas are
busy, and they compute at least as many evicted tokens as new ones. It ends when the contexts of all
active sessions fit.

The first prompt of a session needs no seat, because the session may have no further prompts.
Sessions get seats in the order of their arrival. With several tenants, the sessions of the tenant
that has the fewest context tokens in seats come first. A session loses its seat when it has sent
nothing for IDLE_S, or when its client ends it.

This module only computes. Callers pass the time, in seconds of a monotonic clock.
"""

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from msgspec import Struct

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.contract.records import Count, Seconds
from kvroute.features.line import Waiter
from kvroute.features.seats.active_session import ActiveSession

# Share of the fleet's KV cache that sessions with seats may take. In measurements, a sixth fewer
# turns were completed with 0.7 and with 1.1.
CACHE_SHARE = 0.9
# The limit starts at this cache pressure: evicted tokens that are computed again per new token.
MIN_PRESSURE = 1.0
MIN_BUSY = 0.5  # the limit starts if this share of recent requests found every replica busy
BUSY_WEIGHT = 0.01  # weight of the latest request in the moving average of this share
# Seconds without a request after which a session is no longer active. In measurements, a sixth
# fewer turns were completed with 30 s.
IDLE_S = 60.0
MAX_SESSIONS = 50_000  # upper bound of active sessions, and of stored shared prefixes
INTERVAL_WEIGHT = 0.1  # weight of the latest interval between two seats in the moving average
# Seconds for which this router leaves a free seat to another router where a session waits longer.
PATIENCE_S = 1.0

R = TypeVar("R")  # type of the caller's requests


class WaitingSessions(Struct, array_like=True, frozen=True):
    """The requests that wait in a router until their session gets a seat: the right to send."""

    requests: Count = 0
    oldest_s: Seconds = 0.0  # seconds that the oldest of these requests has waited


@dataclass(slots=True, eq=False)
class SeatWaiter(Waiter[R]):
    """A request whose session may need a seat."""

    turn: SessionTurn
    tokens: int  # prompt tokens

    @property
    def session(self) -> int:
        """Return the number of the request's session."""
        return self.turn.session


@dataclass(frozen=True, slots=True)
class SeatState:
    """The state of the seats, for operators."""

    is_limited: bool  # requests without a seat have to wait
    most: int | None  # number of seats, if the operator has set it
    sessions: int  # number of active sessions
    tokens: int  # context tokens of all active sessions
    seats: int  # number of sessions that hold a seat
    seat_tokens: int  # context tokens of these sessions
    limit_tokens: int  # upper bound of the context tokens of these sessions
    waiting: int  # number of requests in this router that wait for a seat
    oldest_s: float  # longest wait of these requests until now, in seconds
    all_waiting: int  # number of requests in all routers that wait for a seat
    all_oldest_s: float  # longest wait of these requests until now, in seconds


class Seats(Generic[R]):
    """One router's view of the sessions of all routers, and its own requests that wait for a seat.

    Args:
        capacity_tokens: returns the size of the fleet's KV cache.
        most: a fixed number of seats. None: while the cache is too small, as many as fit.
    """

    def __init__(self, capacity_tokens: Callable[[], int], most: int | None = None) -> None:
        # Called when there is something new to report.
        self.on_change: Callable[[], object] = lambda: None
        self._capacity_tokens = capacity_tokens
        self._most = most
        self._is_limited = most is not None
        self._active = OrderedDict[int, ActiveSession]()  # by number, the least recently used first
        self._shared = OrderedDict[int, int]()  # session -> tokens of its shared prefix
        # Last cached block of each session's first prompt. Sessions with the same block share the
        # tokens up to it.
        self._starts = OrderedDict[Fingerprint, None]()
        self._tokens = 0  # context tokens of all active sessions
        self._seats = 0  # number of sessions that hold a seat
        self._seat_tokens = Counter[int]()  # tenant -> context tokens of its sessions with a seat
        self._busy_share = 0.0  # share of recent requests that found every replica busy
        self._pressure = 0.0  # evicted tokens that are computed again per new token
        # Tenant -> its waiting requests.
        self._waiting: dict[int, deque[SeatWaiter[R]]] = defaultdict(deque)
        # Other router -> number of its waiting requests, and time of arrival of the first one.
        self._other_routers: dict[str, tuple[int, float]] = {}
        # True if a session has got a seat, and its waiting requests were not looked for yet.
        self._has_new_seats = False
        # Time since which this router has left a free seat to another router; inf: it does not.
        self._blocked_s = math.inf
        # Time when a waiting session last got a seat, or when the first request began to wait.
        self._granted_s = 0.0
        self._interval_s = 0.0  # mean time between two seats that are granted; 0 if unknown

    def __len__(self) -> int:
        return sum(map(len, [*self._waiting.values()]))

    def __iter__(self) -> Iterator[SeatWaiter[R]]:
        for waiters in self._waiting.values():
            yield from waiters

    # The requests of all routers.

    def observe(self, *, is_busy: bool, pressure: float) -> None:
        """Record the state of the fleet when a new request arrives.

        Args:
            is_busy: whether every replica is busy.
            pressure: evicted tokens that are computed again per new token.
        """
        self._busy_share += BUSY_WEIGHT * (is_busy - self._busy_share)
        self._pressure = pressure

    def sent(
        self,
        turn: SessionTurn,
        tokens: int,
        *,
        cached: tuple[Fingerprint, int],
        now_s: float,
    ) -> None:
        """Record that a router has sent a request of a session.

        Args:
            tokens: length of the prompt.
            cached: last block and number of tokens of the part that some replica had cached.
        """
        self._drop_idle(now_s)
        session = self._active.get(turn.session)
        if session is None:
            shared = self._shared_tokens(turn, *cached)
            session = self._active[turn.session] = ActiveSession(turn.tenant, now_s, shared)
        before = session.tokens
        session.add_turn(turn, tokens)
        self._add_tokens(session, session.tokens - before)
        session.running += 1
        self._mark_used(turn.session, session, now_s)
        if turn.number > 1 and session.seated_s is None:  # its router has given it a seat
            self._seat(session, now_s)

    def ended(self, session: int, now_s: float) -> None:
        """Record that a request of the session has ended."""
        if active := self._active.get(session):
            active.running = max(0, active.running - 1)
            self._mark_used(session, active, now_s)

    def session_ended(self, session: int) -> None:
        """Remove a session that its client has ended, and free its seat."""
        if session in self._active:
            self._drop(session)

    # Requests of this router.

    def can_send(self, waiter: SeatWaiter[R], now_s: float) -> bool:
        """Return whether a new request can be sent now.

        If its session needs a seat and a seat is free, the session gets it.
        """
        self._update(now_s)
        if not self._is_limited or waiter.turn.number == 1:
            return True
        session = self._active.get(waiter.session)
        if session and session.seated_s is not None:
            return True
        if self._waiting or self._other_routers or not self._has_room(waiter):
            return False
        self._reserve(waiter, now_s)
        return True

    def add(self, waiter: SeatWaiter[R]) -> None:
        """Add a request that waits for a seat. Its session counts as active meanwhile."""
        self._session_of(waiter, waiter.arrived_s).running += 1
        if not self._waiting:
            self._granted_s = waiter.arrived_s
        self._waiting[waiter.turn.tenant].append(waiter)
        self.on_change()

    def remove(self, waiter: SeatWaiter[R]) -> bool:
        """Remove a waiting request. Return whether it was waiting."""
        waiters = self._waiting.get(waiter.turn.tenant)
        if not waiters or waiter not in waiters:
            return False
        waiters.remove(waiter)
        if not waiters:
            del self._waiting[waiter.turn.tenant]
        if session := self._active.get(waiter.session):
            session.running = max(0, session.running - 1)
        self.on_change()
        return True

    def due(self, now_s: float) -> SeatWaiter[R] | None:
        """Remove and return a waiting request that can be sent now; None if there is none."""
        if not self._waiting:
            return None
        self._update(now_s)
        waiter = self._next(now_s)
        if waiter is not None:
            self.remove(waiter)
        return waiter

    def forecast_s(self, waiter: SeatWaiter[R]) -> float:
        """Return the expected wait of a new request for a seat, in seconds; 0 if unknown."""
        return (len(self) + self._waiting_at_others() + 1) * self._interval_s

    def _waiting_at_others(self) -> int:
        """Return the number of requests that wait for a seat in other routers."""
        return sum(count for count, _ in [*self._other_routers.values()])

    def state(self, now_s: float) -> SeatState:
        """Return the state for operators. Other threads may call this."""
        arrivals_s = [waiters[0].arrived_s for waiters in [*self._waiting.values()] if waiters]
        others_s = [arrived_s for _, arrived_s in [*self._other_routers.values()]]
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
            len(self) + self._waiting_at_others(),
            now_s - min([*arrivals_s, *others_s], default=now_s),
        )

    # The other routers.

    def report(self, now_s: float) -> WaitingSessions:
        """Return the waiting requests of this router, for the other routers."""
        arrivals_s = [waiters[0].arrived_s for waiters in self._waiting.values()]
        oldest_s = max(0.0, now_s - min(arrivals_s)) if arrivals_s else 0.0
        return WaitingSessions(len(self), oldest_s)

    def receive(self, router: str, waiting: WaitingSessions, now_s: float) -> None:
        """Record another router's report."""
        if waiting.requests:
            self._other_routers[router] = (waiting.requests, now_s - waiting.oldest_s)
        else:
            self.forget(router)

    def forget(self, router: str) -> None:
        """Forget a router that has ended, or that has no waiting requests."""
        self._other_routers.pop(router, None)

    # The number of seats.

    def _drop_idle(self, now_s: float) -> None:
        """Remove idle sessions. If there are still too many, remove the least recently used."""
        while len(self._active) > MAX_SESSIONS:
            self._drop(next(iter(self._active)))
        while self._active:
            number, session = next(iter(self._active.items()))
            if now_s - session.used_s < IDLE_S:
                break
            if session.running:
                self._mark_used(number, session, now_s)
            else:
                self._drop(number)

    def _update(self, now_s: float) -> None:
        """Remove idle sessions, and start or end the limit if its conditions have changed."""
        self._drop_idle(now_s)
        if self._most is not None:
            return
        fits = self._tokens <= self._limit_tokens()
        if self._is_limited:
            self._is_limited = not fits
        elif not fits and self._pressure >= MIN_PRESSURE and self._busy_share >= MIN_BUSY:
            self._is_limited = True
            self._unseat_latest()

    def _unseat_latest(self) -> None:
        """Take seats from the sessions that got them last, until the other sessions fit."""
        seated = [session for session in self._active.values() if session.seated_s is not None]
        for session in sorted(seated, key=lambda session: session.seated_s or 0.0, reverse=True):
            if self._seat_tokens.total() <= self._limit_tokens():
                break
            self._unseat(session)

    def _limit_tokens(self) -> int:
        return int(CACHE_SHARE * self._capacity_tokens())

    def _has_room(self, waiter: SeatWaiter[R]) -> bool:
        """Return whether the request's session can get a seat.

        If no session has a seat, it can get one even if it does not fit in the cache.
        """
        if self._most is not None:
            return self._seats < self._most
        tokens = self._needed_tokens(waiter)
        return not self._seats or self._seat_tokens.total() + tokens <= self._limit_tokens()

    def _needed_tokens(self, waiter: SeatWaiter[R]) -> int:
        """Return the context tokens that the session will have with this request."""
        session = self._active.get(waiter.session)
        shared = session.shared_tokens if session else self._shared.get(waiter.session, 0)
        return max(waiter.tokens - shared, session.tokens if session else 0)

    def _reserve(self, waiter: SeatWaiter[R], now_s: float) -> None:
        """Give the request's session a seat now. The request itself may be sent some time later."""
        self._seat(self._session_of(waiter, now_s), now_s)

    def _session_of(self, waiter: SeatWaiter[R], now_s: float) -> ActiveSession:
        """Return the request's session, after adding the request's tokens to its context.

        A session that is not active becomes active.
        """
        session = self._active.get(waiter.session)
        if session is None:
            shared = self._shared.get(waiter.session, 0)
            session = self._active[waiter.session] = ActiveSession(
                waiter.turn.tenant, now_s, shared
            )
        context = max(0, waiter.tokens - session.shared_tokens - session.tokens)
        session.contexts[waiter.turn.end] = session.contexts.get(waiter.turn.end, 0) + context
        session.tokens += context
        self._add_tokens(session, context)
        self._mark_used(waiter.session, session, now_s)
        return session

    def _next(self, now_s: float) -> SeatWaiter[R] | None:
        """Return the waiting request that can be sent next, or None if all have to wait."""
        first = min(  # of the tenant with the fewest context tokens in seats
            (waiters[0] for waiters in self._waiting.values()),
            key=lambda waiter: (self._seat_tokens[waiter.turn.tenant], waiter.arrived_s),
        )
        if not self._is_limited:
            return first
        if self._has_new_seats:  # all waiting requests of a session can use its new seat
            for waiter in self:
                session = self._active.get(waiter.session)
                if session and session.seated_s is not None:
                    return waiter
            self._has_new_seats = False
        if not self._has_room(first):
            self._blocked_s = math.inf
            return None
        # A session that has waited longer at another router gets the seat, unless that router does
        # not use it within PATIENCE_S.
        if any(arrived_s < first.arrived_s for _, arrived_s in self._other_routers.values()):
            self._blocked_s = min(self._blocked_s, now_s)
            if now_s - self._blocked_s < PATIENCE_S:
                return None
        self._blocked_s = math.inf
        self._record_interval(now_s)
        self._reserve(first, now_s)
        return first

    def _record_interval(self, now_s: float) -> None:
        """Update the mean interval between two seats, because a waiting session gets a seat now."""
        interval_s = now_s - self._granted_s
        share = INTERVAL_WEIGHT if self._interval_s else 1.0
        self._interval_s += share * (interval_s - self._interval_s)
        self._granted_s = now_s

    # Sums.

    def _mark_used(self, number: int, session: ActiveSession, now_s: float) -> None:
        session.used_s = now_s
        self._active.move_to_end(number)

    def _shared_tokens(self, turn: SessionTurn, block: Fingerprint, tokens: int) -> int:
        """Return the number of tokens at the start of a session's prompts that are shared.

        These are the tokens of its first prompt that a replica already had cached, if the first
        prompt of an earlier session ended its cached part with the same block.

        Args:
            block: last block of the prompt's cached part.
            tokens: number of tokens in this part.
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

    def _add_tokens(self, session: ActiveSession, tokens: int) -> None:
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
