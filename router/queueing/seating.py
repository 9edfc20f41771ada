"""Waits until a request's session has a seat, or refuses the request.

A seat is the permission of a session to send requests. Sessions need seats only while their
contexts together do not fit in the fleet's caches; otherwise, no request waits here.
admission/seats.py decides which session gets a seat.
"""

import asyncio
import math
import time
from collections.abc import Callable

from kvroute.contract.keep import NO_BLOCK
from kvroute.router.admission.seats import Seats, Waiter
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.refusals import no_seat
from kvroute.router.queueing.wake import Wake

# The most requests that may wait. Half of the default of --max-requests, so that requests which
# need no seat are still accepted.
WAITING = 1000
# Seconds between two checks for a free seat. A seat becomes free without a signal here when a
# session is idle for too long, or when another router releases the seat.
POLL_S = 0.25
# Seconds between two messages to a waiting client. Proxies give up after 30 or 60 s without a byte.
NOTICE_S = 15.0

Answer = asyncio.Future[None]  # done when the request's session has a seat


class Seating:
    """One router's requests for one model that wait for a seat.

    Args:
        busy_backlog_s: returns the backlog at which a replica counts as busy.
        max_wait_s: the longest wait; 0: no limit.
        wake: is set when a seat may be free.
        notice_s: see NOTICE_S.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        seats: Seats[Answer],
        fleet: Fleet,
        *,
        busy_backlog_s: Callable[[], float],
        max_wait_s: float,
        wake: Wake,
        notice_s: float = NOTICE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seats = seats
        self._fleet = fleet
        self._busy_backlog_s = busy_backlog_s
        self._max_wait_s = max_wait_s or math.inf
        self._wake = wake
        self._notice_s = notice_s
        self._clock = clock
        self._has_waiting = asyncio.Event()

    async def seat(self, placement: Placement, context: RequestContext) -> float:
        """Wait until the request's session has a seat. Requests that need no seat do not wait.

        Args:
            context: the request's context; its `retention` must be set.

        Returns:
            The seconds that the request has waited.

        Raises:
            ApiError: the request has waited too long, or is expected to wait too long.
        """
        now_s = self._clock()
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        self._seats.observe(is_busy=least_s >= self._busy_backlog_s(), pressure=placement.pressure)
        waiter = _waiter(placement, context)
        if waiter is None or self._seats.can_send(waiter, now_s):
            return 0.0
        max_wait_s = min(self._max_wait_s, context.urgency.deadline_s)
        self._check(waiter, context, max_wait_s)
        self._seats.add(waiter)
        try:
            await self._wait(waiter, context, now_s + max_wait_s)
        finally:  # also if the client has disconnected or the wait was too long
            self._seats.remove(waiter)
        waited_s = self._clock() - now_s
        self._fleet.observer.seated(waited_s)
        return waited_s

    async def _wait(self, waiter: Waiter[Answer], context: RequestContext, until_s: float) -> None:
        self._has_waiting.set()
        while True:
            within_s = min(self._notice_s, until_s - self._clock())
            await asyncio.wait([waiter.request], timeout=max(0.0, within_s))
            if waiter.request.done():
                return
            if self._clock() >= until_s:
                self._seats.remove(waiter)
                wait_s = self._seats.forecast_s(waiter)  # for a request that arrives now
                raise self._refusal(context, "has waited", until_s - waiter.arrived_s, wait_s)
            if context.still_waiting is not None:
                await context.still_waiting()

    async def run(self) -> None:
        """Release requests whose sessions get a seat, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._seats:
                while waiter := self._seats.due(self._clock()):
                    if not waiter.request.done():
                        waiter.request.set_result(None)
                    await asyncio.sleep(0)
                await self._wake.wait(POLL_S)
            self._has_waiting.clear()

    def _check(self, waiter: Waiter[Answer], context: RequestContext, max_wait_s: float) -> None:
        """Check that a request is not expected to wait too long.

        If no other request waits, the request may always wait: its wait shows whether the forecast
        is still right.

        Raises:
            ApiError: the request is expected to wait too long, or too many requests wait.
        """
        if not self._seats:
            return
        forecast_s = self._seats.forecast_s(waiter)
        if forecast_s > max_wait_s:
            raise self._refusal(context, "would wait", forecast_s, forecast_s)
        if len(self._seats) >= WAITING:
            raise self._refusal(
                context, f"is one of more than {WAITING} that wait", None, forecast_s
            )

    def _refusal(
        self, context: RequestContext, problem: str, wait_s: float | None, then_s: float
    ) -> ApiError:
        """Count a refusal and return its error.

        Args:
            problem: continues the message after "this request".
            wait_s: the predicted wait of the request, or its wait so far; None: unknown.
            then_s: the predicted wait of a request that arrives now.
        """
        self._fleet.observer.rejected(context.urgency.priority, "no_seat")
        return no_seat(problem, wait_s, then_s, self._max_wait_s, context.urgency.deadline_s)


def _waiter(placement: Placement, context: RequestContext) -> Waiter[Answer] | None:
    """Return the request as an item that waits for a seat; None if it needs no seat.

    Batch requests need no seat, since they run while nothing else waits. A call with several
    prompts needs none either, since it is not a turn of a conversation.
    """
    retention = context.retention
    if retention is None or retention.turn.end == NO_BLOCK:
        return None
    if context.urgency.is_batch or context.prompts > 1:
        return None
    return Waiter(
        asyncio.get_running_loop().create_future(),
        retention.turn,
        placement.prompt_tokens,
        retention.turn.tenant,
        context.ready_s,
    )
