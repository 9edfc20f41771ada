"""Waits until a feature lets a request go, or refuses the request.

The feature has a line (kvroute/features/line.py), which decides when a request may go. Most
requests may go at once, and do not wait here.
"""

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from kvroute.features.line import Line, Waiter
from kvroute.router.placement.attempts import Placement, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.wake import Wake

# The most requests that may wait. Half of the default of --max-requests, so that requests which
# need not wait are still accepted.
WAITING = 1000
# Seconds between two checks whether a request may go. It may become so without a signal here, such
# as when another router ends a session.
POLL_S = 0.25

Release = asyncio.Future[None]  # done when the request may go


class WaitingRoom:
    """One router's requests for one model that wait in a feature's line.

    Args:
        busy_backlog_s: returns the backlog at which a replica counts as busy.
        wake: is set when a request may be able to go.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        line: Line[Release, Any],
        fleet: Fleet,
        *,
        busy_backlog_s: Callable[[], float],
        wake: Wake,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.line = line
        self._fleet = fleet
        self._busy_backlog_s = busy_backlog_s
        self._max_wait_s = line.max_wait_s or math.inf
        self._wake = wake
        self._clock = clock
        self._has_waiting = asyncio.Event()

    async def leave(self, placement: Placement, context: RequestContext) -> float:
        """Wait until the request may go.

        Args:
            context: the request's context; its `turn` must be set.

        Returns:
            The seconds that the request has waited.

        Raises:
            ApiError: the request has waited too long, or is expected to wait too long.
        """
        now_s = self._clock()
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        self.line.observe(placement, is_busy=least_s >= self._busy_backlog_s())
        release = asyncio.get_running_loop().create_future()
        waiter = self.line.ask(release, placement, context, now_s)
        if waiter is None:
            return 0.0
        max_wait_s = min(self._max_wait_s, context.urgency.deadline_s)
        self._check(waiter, context, max_wait_s)
        self.line.add(waiter)
        try:
            await self._wait(waiter, context, now_s + max_wait_s)
        finally:  # also if the client has disconnected or the wait was too long
            self.line.remove(waiter)
        waited_s = self._clock() - now_s
        self.line.record_wait(waited_s)
        return waited_s

    async def _wait(self, waiter: Waiter[Release], context: RequestContext, until_s: float) -> None:
        self._has_waiting.set()
        within_s = max(0.0, until_s - self._clock())
        await asyncio.wait([waiter.request], timeout=None if within_s == math.inf else within_s)
        if not waiter.request.done():
            self.line.remove(waiter)
            wait_s = self.line.forecast_s(waiter)  # for a request that arrives now
            raise self._refusal(context, "has waited", until_s - waiter.arrived_s, wait_s)

    async def run(self) -> None:
        """Release requests that may go, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self.line:
                while waiter := self.line.due(self._clock()):
                    if not waiter.request.done():
                        waiter.request.set_result(None)
                    await asyncio.sleep(0)
                await self._wake.wait(POLL_S)
            self._has_waiting.clear()

    def _check(self, waiter: Waiter[Release], context: RequestContext, max_wait_s: float) -> None:
        """Check that a request is not expected to wait too long.

        If no other request waits, the request may always wait: its wait shows whether the forecast
        is still right.

        Raises:
            ApiError: the request is expected to wait too long, or too many requests wait.
        """
        if not self.line:
            return
        forecast_s = self.line.forecast_s(waiter)
        if forecast_s > max_wait_s:
            raise self._refusal(context, "would wait", forecast_s, forecast_s)
        if len(self.line) >= WAITING:
            raise self._refusal(
                context, f"is one of more than {WAITING} that wait", None, forecast_s
            )

    def _refusal(
        self, context: RequestContext, problem: str, wait_s: float | None, then_s: float
    ) -> Exception:
        """Count a refusal and return its error.

        Args:
            problem: continues the message after "this request".
            wait_s: the predicted wait of the request, or its wait so far; None: unknown.
            then_s: the predicted wait of a request that arrives now.
        """
        urgency = context.urgency
        self._fleet.observer.rejected(urgency.priority, f"no_{self.line.reason}")
        return self.line.refusal(problem, wait_s, then_s, urgency.deadline_s)
