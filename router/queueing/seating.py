"""Requests wait here until their session has a seat, or are refused.

admission/seats.py decides who gets one. While sessions are not limited, nothing waits.
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

WAITING = 1000  # requests that may wait; half of --max-requests, so that others get in
POLL_S = 0.25  # seconds between two looks for a free seat; idle time and other routers free seats
NOTICE_S = (
    15.0  # seconds between two signs of life; proxies give up after 30 or 60 s without a byte
)

Answer = asyncio.Future[None]  # done: its session has a seat


class Seating:
    """One router's requests for one model that wait for a seat.

    Args:
        hold_s: returns the prefill queued on a replica from which on it is busy.
        most_s: the longest wait; 0: any.
        wake: is rung when seats may be free.
    """

    def __init__(
        self,
        seats: Seats[Answer],
        fleet: Fleet,
        *,
        hold_s: Callable[[], float],
        most_s: float,
        wake: Wake,
        notice_s: float = NOTICE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seats = seats
        self._fleet = fleet
        self._hold_s = hold_s
        self._most_s = most_s or math.inf
        self._wake = wake
        self._notice_s = notice_s
        self._clock = clock
        self._has_waiting = asyncio.Event()

    async def seat(self, placement: Placement, context: RequestContext) -> float:
        """Return when the request's session has a seat, at once if it needs none.

        Args:
            context: with the prompt's retention.

        Returns:
            The seconds that it has waited.

        Raises:
            ApiError: it waits too long, or would.
        """
        now_s = self._clock()
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        self._seats.observe(is_busy=least_s >= self._hold_s(), pressure=placement.pressure)
        waiter = _waiter(placement, context)
        if waiter is None or self._seats.can_send(waiter, now_s):
            return 0.0
        most_s = min(self._most_s, context.urgency.deadline_s)
        self._check(waiter, context, most_s)
        self._seats.add(waiter)
        try:
            await self._seated(waiter, context, now_s + most_s)
        finally:
            self._seats.remove(waiter)  # the client has left, or it was too long
        waited_s = self._clock() - now_s
        self._fleet.observer.seated(waited_s)
        return waited_s

    async def _seated(
        self, waiter: Waiter[Answer], context: RequestContext, until_s: float
    ) -> None:
        self._has_waiting.set()
        while True:
            within_s = min(self._notice_s, until_s - self._clock())
            await asyncio.wait([waiter.request], timeout=max(0.0, within_s))
            if waiter.request.done():
                return
            if self._clock() >= until_s:
                self._seats.remove(waiter)
                wait_s = self._seats.forecast_s(waiter)  # wait of a request that comes now
                raise self._refusal(context, "has waited", until_s - waiter.arrived_s, wait_s)
            if context.still_waiting is not None:
                await context.still_waiting()

    async def run(self) -> None:
        """Let requests go whose sessions get a seat, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._seats:
                while waiter := self._seats.due(self._clock()):
                    if not waiter.request.done():
                        waiter.request.set_result(None)
                    await asyncio.sleep(0)
                await self._wake.next(POLL_S)
            self._has_waiting.clear()

    def _check(self, waiter: Waiter[Answer], context: RequestContext, most_s: float) -> None:
        """Refuse a request that would wait too long.

        The first request in the line may always wait: its wait shows whether the forecast still
        holds.
        """
        if not self._seats:
            return
        forecast_s = self._seats.forecast_s(waiter)
        if forecast_s > most_s:
            raise self._refusal(context, "would wait", forecast_s, forecast_s)
        if len(self._seats) >= WAITING:
            raise self._refusal(context, "is one of too many that wait", None, forecast_s)

    def _refusal(
        self, context: RequestContext, problem: str, wait_s: float | None, then_s: float
    ) -> ApiError:
        """Return a 429 that says when to come again.

        Args:
            wait_s: as it is forecast, or as it was.
            then_s: the wait of a request that comes now.
        """
        self._fleet.observer.turned_away(context.urgency.priority, "no_seat")
        return no_seat(problem, wait_s, then_s, self._most_s, context.urgency.deadline_s)


def _waiter(placement: Placement, context: RequestContext) -> Waiter[Answer] | None:
    """Return the request as one that may have to wait; None: it needs no seat.

    Batch requests run when nothing else does. A call with several prompts is no turn of a
    conversation.
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
        context.at_s,
    )
