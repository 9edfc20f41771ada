"""The seats of one model in one router: what the core calls."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, Histogram

from kvroute.contract.keep import NO_BLOCK, SessionTurn
from kvroute.features.figure import Figure
from kvroute.features.line import Line
from kvroute.features.router_feature import RouterFeature
from kvroute.features.seats import NO_SEAT, seat_metrics
from kvroute.features.seats.seats import IDLE_S, Seats, SeatState, SeatWaiter, WaitingSessions
from kvroute.process.exposition import Readings
from kvroute.router.api.errors import ApiError
from kvroute.router.queueing.refusals import retry_s
from kvroute.wording import plural

if TYPE_CHECKING:
    from kvroute.router.placement.attempts import Attempt, Placement, RequestContext
    from kvroute.router.placement.fleet import Fleet

ABOUT = (  # explains the figure
    "Sessions need a seat to send requests, since the contexts of all sessions exceed the caches "
    "or --max-sessions."
)
_decode = msgspec.msgpack.Decoder(WaitingSessions).decode
_encode = msgspec.msgpack.Encoder().encode


class RouterSeats(RouterFeature):
    """The limit of active sessions. All routers' requests count, so that all agree about it.

    Args:
        most: a fixed number of seats; None: while the caches are too small, as many as fit.
        max_wait_s: the longest wait of a request for a seat; 0: no limit.
    """

    name = "seats"

    def __init__(self, most: int | None = None, *, max_wait_s: float = 0.0) -> None:
        self._cache_tokens = 0  # tokens that all caches can hold together
        self.seats = Seats[Any](lambda: self._cache_tokens, most)
        self.seats.on_change = lambda: self.on_change()
        self.line: SeatLine = SeatLine(self.seats, max_wait_s)

    def updated(self, fleet: "Fleet") -> None:
        self._cache_tokens = sum(map(fleet.caches.capacity_tokens, fleet.replicas.own_records))

    def attempt_began(self, attempt: "Attempt") -> None:
        dispatch = attempt.dispatch
        if turn := dispatch.turn:
            block = dispatch.known_block or NO_BLOCK
            cached = block, dispatch.prompt_tokens - dispatch.new_tokens
            self.seats.sent(
                turn,
                dispatch.prompt_tokens,
                cached=cached,
                now_s=attempt.sent_s,
            )

    def attempt_ended(self, attempt: "Attempt") -> None:
        if turn := attempt.dispatch.turn:
            self.seats.ended(turn.session, attempt.end_s)
            if turn.is_last and attempt.is_over:
                self.seats.session_ended(turn.session)

    def session_ended(self, session: int, last: SessionTurn | None) -> None:
        self.seats.session_ended(session)

    def share(self, now_s: float) -> bytes | None:
        waiting = self.seats.report(now_s)
        return _encode(waiting) if waiting.requests else None

    def receive(self, router: str, data: bytes | None, now_s: float) -> None:
        self.seats.receive(router, _decode(data) if data else WaitingSessions(), now_s)

    def forget(self, router: str) -> None:
        self.seats.forget(router)

    def metrics(self, registry: CollectorRegistry, readings: Readings) -> None:
        self.line.waits = seat_metrics.waits(registry)
        seat_metrics.export(self.seats, readings, time.monotonic)

    def state(self) -> Mapping[str, Any]:
        return as_json(self.seats.state(time.monotonic()))

    async def figures(self) -> Sequence[Figure]:
        state = self.seats.state(time.monotonic())
        if not state.is_limited:
            return ()
        note = f"of {plural(state.sessions, 'session')}; "
        note += f"{plural(state.all_waiting, 'request')} waiting for a seat"
        if state.all_waiting:
            note += f", the oldest for {state.all_oldest_s:.0f} s"
        is_bad = state.all_waiting > 0
        return [Figure("Sessions with a seat", f"{state.seats:,}", note, ABOUT, is_bad)]


class SeatLine(Line[Any, SeatWaiter[Any]]):
    """The requests that wait until their session has a seat."""

    reason = "seat"
    recheck_s = IDLE_S / 60  # a seat becomes free without an event when its session is idle

    def __init__(self, seats: Seats[Any], max_wait_s: float) -> None:
        self._seats = seats
        self.max_wait_s = max_wait_s
        self.waits: Histogram | None = None  # None: metrics are off

    def observe(self, placement: "Placement", *, is_busy: bool) -> None:
        self._seats.observe(is_busy=is_busy, pressure=placement.pressure)

    def ask(
        self, request: Any, placement: "Placement", context: "RequestContext", now_s: float
    ) -> SeatWaiter[Any] | None:
        """Return the request as an item of the line; None: it may go.

        Batch requests need no seat, since they run while nothing else waits. A call with several
        prompts needs none either, since it is not a turn of a conversation.
        """
        turn = context.turn
        if turn is None or turn.end == NO_BLOCK:
            return None
        if context.urgency.is_batch or context.prompts > 1:
            return None
        waiter = SeatWaiter(request, context.ready_s, turn, placement.prompt_tokens)
        return None if self._seats.can_send(waiter, now_s) else waiter

    def add(self, waiter: SeatWaiter[Any]) -> None:
        self._seats.add(waiter)

    def remove(self, waiter: SeatWaiter[Any]) -> bool:
        return self._seats.remove(waiter)

    def due(self, now_s: float) -> SeatWaiter[Any] | None:
        return self._seats.due(now_s)

    def record_wait(self, waited_s: float) -> None:
        if self.waits is not None:
            self.waits.observe(waited_s)

    def forecast_s(self, waiter: SeatWaiter[Any]) -> float:
        return self._seats.forecast_s(waiter)

    def refusal(
        self, problem: str, wait_s: float | None, then_s: float, deadline_s: float
    ) -> Exception:
        return no_seat(problem, wait_s, then_s, self.max_wait_s or math.inf, deadline_s)

    def __len__(self) -> int:
        return len(self._seats)


def as_json(state: SeatState) -> dict[str, Any]:
    """Return how many sessions are active, hold seats or wait for one, and the limits."""
    return {
        "is_limited": state.is_limited,
        "most": state.most,
        "sessions": state.sessions,
        "tokens": state.tokens,
        "seats": state.seats,
        "seat_tokens": state.seat_tokens,
        "limit_tokens": state.limit_tokens,
        "waiting": state.waiting,
        "oldest_s": round(state.oldest_s, 3),
        "all_routers": {
            "waiting": state.all_waiting,
            "oldest_s": round(state.all_oldest_s, 3),
        },
    }


def no_seat(
    problem: str, wait_s: float | None, then_s: float, option_s: float, deadline_s: float
) -> ApiError:
    """Return a 429 for a session that does not get a seat in time.

    A seat is the permission of a session to send requests.

    Args:
        problem: continues the message after "this request", such as "would wait".
        wait_s: the predicted wait, or the wait so far; None: unknown.
        then_s: the predicted wait of a request that arrives now.
        option_s: the longest wait that --max-seat-wait-s allows.
        deadline_s: the longest wait that the request allows.
    """
    max_wait_s = min(option_s, deadline_s)
    again_s = retry_s(then_s - max_wait_s if max_wait_s < math.inf else 0.0)
    name = "its deadline" if deadline_s < option_s else "--max-seat-wait-s"
    duration = "" if wait_s is None else f" {wait_s:.3g} s"
    limit = "" if max_wait_s == math.inf else f", and {name} is {max_wait_s:g} s"
    return ApiError(
        429,
        f"this request {problem}{duration} for a seat of its session{limit}: more sessions are "
        f"active than --max-sessions allows at once; try again in {again_s} s, or add replicas",
        code=NO_SEAT,
        headers={"retry-after": str(again_s)},
    )
