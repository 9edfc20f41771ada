"""Requests wait here until it is their turn to go to a replica, or are refused.

The order is the queue's (admission/queue.py). A fleet that has time never notices.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kvroute.contract.priority import Priority
from kvroute.router.admission.forecast import Arrivals, Correction, Margin
from kvroute.router.admission.queue import (
    BATCH_S,
    Held,
    Queue,
    QueueState,
)
from kvroute.router.admission.waits import NO_WAIT, Reason, Refusal, Urgency, Wait
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import (
    Attempt,
    Placement,
    RequestContext,
    RequestObserver,
)
from kvroute.router.placement.fleet import Fleet

WAITING = 4096  # requests that may wait for their turn; further ones get a 429
WAITING_BATCH = 500  # the same of batch requests; fewer than a router takes of all (--max-requests)
RECOVERY_S = 60.0  # the longest wait for a replica while there is none
REFUSED_S = 5.0  # for which a refusal says that replicas are missed ...
MOST_REFUSED_S = 60.0  # ... for so long at most
FRESH_S = 0.01  # for which a forecast for an empty prompt holds
OVERDUE = 2.0  # a request that was refused in the end would have waited so many times longer
MOST_RETRY_S = 3600.0  # after which a client is told to come again

Answer = asyncio.Future[Refusal | None]  # None: it is its turn


class Turn(Struct, frozen=True):
    """A request may go to a replica. at_s: its place in the engines' order, on the clock here.
    among: the replicas that it may go to; empty: all."""

    at_s: float
    wait: Wait = NO_WAIT
    among: Sequence[str] = ()
    refused_s: float = 0.0  # for which others would have waited that were just refused

    @property
    def missed_s(self) -> float:
        """For how long replicas were missed; batch requests want none of their own."""
        return 0.0 if self.wait.priority == "batch" else max(self.wait.waited_s, self.refused_s)


class Wake(RequestObserver):
    """Says when replicas may have room again."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        self._event.set()

    def first_token(self, attempt: Attempt) -> None:
        self._event.set()

    def ended(self, attempt: Attempt) -> None:
        self._event.set()

    async def next(self, within_s: float) -> None:
        """Returns after the next ring, or then."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._event.wait()
        self._event.clear()


class Holding:
    """One router's waiting requests for one model.

    trusted: returns the replicas that take requests. routers: how many there are, this one too.
    """

    def __init__(
        self,
        queue: Queue[Answer],
        fleet: Fleet,
        trusted: Callable[[], list[str]],
        *,
        wake: Wake,
        routers: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._trusted = trusted
        self._wake = wake
        self._routers = routers
        self._clock = clock
        self._has_waiting = asyncio.Event()
        self._seen_s = 0.0  # when there was a replica, last
        self._refused = (0.0, -math.inf)  # the last forecast of those that were refused, and when
        self._arrivals = Arrivals(lambda: fleet.loads.scale.busy_s)
        self._correction = Correction(fleet.loads.scale.busy_s)
        self._margin = Margin()
        # By wish, priority and sharer; of empty prompts, as of _forecast_s.
        self._forecasts: dict[tuple[float, Priority, str], float] = {}
        self._forecast_s = -math.inf

    def states(self) -> Mapping[str, QueueState]:
        """What waits, by the queue's classes."""
        return self._queue.state(self._clock())

    @property
    def correction(self) -> float:
        """By which forecasts are multiplied, since earlier ones were wrong."""
        return self._correction.factor

    @property
    def margin(self) -> float:
        """By which forecasts must stay below a request's limit."""
        return self._margin.factor

    # Entering.

    async def turn(self, placement: Placement, context: RequestContext) -> Turn:
        """Returns when it is the request's turn; at once while replicas have time for it. ApiError
        when it waits too long, or would."""
        now_s, urgency = self._clock(), context.urgency
        held = _held(placement, context)
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        if self._queue.is_free(held, least_s):
            self._arrivals.add(held.prefill_s, self._queue.turn_s(held) - held.arrived_s, now_s)
            self._queue.sent(held, now_s)
            refused_s = self._refused_s(now_s)
            return Turn(self._queue.turn_s(held), Wait(urgency.priority), refused_s=refused_s)
        raw_s = self._raw_forecast_s(held, len(placement.ranking), least_s, now_s)
        forecast_s = self._correction.factor * raw_s
        self._check(urgency, forecast_s)
        if self._is_full(held):
            raise self._refusal(urgency, "full", forecast_s)
        if not held.is_batch:  # of those, none passes anybody
            self._arrivals.add(held.prefill_s, self._queue.turn_s(held) - held.arrived_s, now_s)
        self._queue.add(held)
        refusal = await self._released(held, urgency.most_s)
        later_s = self._clock()
        waited_s = later_s - now_s
        if refusal != "no_replica" and not held.has_filled:  # what fills waits for more
            self._correction.learn(raw_s, waited_s * (OVERDUE if refusal else 1.0))
            if urgency.own_s is None:
                self._margin.learn(forecast_s / urgency.most_s, is_late=refusal is not None)
        if refusal is not None:
            raise self._refusal(urgency, refusal, waited_s, self._least_s(urgency, held.tenant))
        self._queue.sent(held, later_s)
        reason: Reason = "busy" if least_s >= self._queue.hold_s else "order"
        wait = Wait(urgency.priority, reason, waited_s, forecast_s)
        self._fleet.observer.waited(wait)
        behind_s = BATCH_S if held.among else 0.0  # in the engines too, if it fills
        return Turn(held.turn_s + behind_s, wait, held.among, self._refused_s(later_s))

    def _is_full(self, held: Held[Answer]) -> bool:
        """Batch requests take no places of others."""
        if held.is_batch:
            return self._queue.batch >= WAITING_BATCH
        return len(self._queue) - self._queue.batch >= WAITING

    def check(self, urgency: Urgency, sharer: str) -> None:
        """ApiError if even an empty prompt would wait too long; takes microseconds."""
        if urgency.most_s < math.inf:
            self._check(urgency, self._least_s(urgency, sharer))

    async def _released(self, held: Held[Answer], within_s: float) -> Refusal | None:
        """Returns when it has left the queue: None if it is its turn."""
        answer = held.request
        timer = None
        if within_s < math.inf:
            timer = asyncio.get_running_loop().call_later(within_s, self._overdue, held)
        self._seen_s = max(self._seen_s, self._clock())
        self._has_waiting.set()
        self._wake.ring()
        try:
            return await answer
        finally:
            if timer:
                timer.cancel()
            if answer.cancelled():  # the client has left
                self._queue.remove(held)

    def _overdue(self, held: Held[Answer]) -> None:
        self._expire(held, "deadline" if self._trusted() else "no_replica")

    def _expire(self, held: Held[Answer], refusal: Refusal) -> None:
        if not held.request.done() and self._queue.remove(held):
            held.request.set_result(refusal)

    # Leaving.

    async def run(self) -> None:
        """Lets requests go, each in its turn, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._queue:
                await self._release()
                await self._wake.next(self._queue.wake_s)
            self._has_waiting.clear()

    async def _release(self) -> None:
        """All whose turn it is now."""
        replicas = self._replicas()
        while self._queue and (held := self._due(replicas)):
            if not held.request.done():
                held.request.set_result(None)
            await asyncio.sleep(0)  # it is sent, and counts as load there
            replicas = self._trusted()

    def _due(self, replicas: Sequence[str]) -> Held[Answer] | None:
        now_s = self._clock()
        return self._queue.due(self._fleet.loads.rooms(replicas, now_s), now_s)

    def _replicas(self) -> list[str]:
        """Those that take requests. Without any for long, nobody waits on."""
        replicas, now_s = self._trusted(), self._clock()
        if replicas:
            self._seen_s = now_s
        elif now_s - self._seen_s >= RECOVERY_S:
            for held in [*self._queue]:
                self._expire(held, "no_replica")
        return replicas

    # Forecasts.

    def _raw_forecast_s(
        self, held: Held[Answer], replicas: int, least_s: float, now_s: float
    ) -> float:
        """Without the correction. least_s: pending on the replica that will have room first."""
        routers = self._routers()
        sooner = [routers * rate for rate in self._arrivals.sooner(now_s)]
        turn_s = self._queue.forecast_s(held, replicas=replicas, sooner=sooner, now_s=now_s)
        return max(0.0, least_s - self._queue.hold_s) + turn_s

    def _least_s(self, urgency: Urgency, sharer: str) -> float:
        """How long an empty prompt would wait that comes now."""
        now_s, kind = self._clock(), (urgency.later_s, urgency.priority, sharer)
        if now_s - self._forecast_s > FRESH_S:
            self._forecasts.clear()
            self._forecast_s = now_s
        if kind not in self._forecasts:
            empty = _empty(urgency, sharer, now_s)
            self._forecasts[kind] = self._empty_s(empty, now_s)
        return self._forecasts[kind]

    def _empty_s(self, empty: Held[Answer], now_s: float) -> float:
        """The same, computed."""
        replicas = self._trusted()
        least_s = min(self._fleet.loads.backlogs_s(replicas, now_s), default=0.0)
        if not replicas or self._queue.is_free(empty, least_s):
            return 0.0
        return self._correction.factor * self._raw_forecast_s(empty, len(replicas), least_s, now_s)

    # Refusing.

    def _refused_s(self, now_s: float) -> float:
        """How long those would have waited that were refused just now. Replicas are told, as the
        fleet grows by it."""
        wait_s, at_s = self._refused
        return wait_s if now_s - at_s < REFUSED_S else 0.0

    def _check(self, urgency: Urgency, forecast_s: float) -> None:
        most_s = self._margin.factor * forecast_s
        if most_s > urgency.most_s:
            raise self._refusal(urgency, "forecast", most_s)

    def _refusal(
        self, urgency: Urgency, refusal: Refusal, wait_s: float, then_s: float = 0.0
    ) -> ApiError:
        """wait_s: as it is forecast, or as it was. then_s: that of an empty prompt."""
        self._fleet.observer.turned_away(urgency.priority, refusal)
        if refusal == "no_replica":
            return no_replica()
        if not urgency.is_batch and urgency.own_s is None:
            self._refused = (min(wait_s, MOST_REFUSED_S), self._clock())
        if refusal == "full":
            return ApiError(
                429, "too many requests are waiting; try again later", code="overloaded"
            )
        if refusal == "deadline":
            return too_long(urgency, f"has waited {wait_s:.3g} s", then_s)
        return too_long(urgency, f"would wait up to {wait_s:.3g} s", wait_s)


def no_replica() -> ApiError:
    return ApiError(503, "no replica is ready; try again", type="server_error")


def too_long(urgency: Urgency, problem: str, forecast_s: float) -> ApiError:
    """A 429 that says when to come again: nobody waits longer while nobody else comes."""
    wait_s = max(1, math.ceil(min(MOST_RETRY_S, forecast_s - urgency.most_s)))
    whose = "--max-wait-s" if urgency.own_s is None else "its deadline"
    return ApiError(
        429,
        f"this request {problem} until a replica begins with it, and {whose} is "
        f"{urgency.most_s:g} s; come again in {wait_s} s, or have more replicas",
        type="rate_limit_error",
        code="wait_too_long",
        headers={"retry-after": str(wait_s)},
    )


def _held(placement: Placement, context: RequestContext) -> Held[Answer]:
    best = placement.ranking[0]
    return Held(
        _answer(),
        context.at_s,
        best.own_s + best.copy_s + best.lora_s,
        context.urgency.later_s,
        context.urgency.is_interactive,
        context.urgency.is_batch,
        context.sharer,
        placement.home,
    )


def _empty(urgency: Urgency, sharer: str, now_s: float) -> Held[Answer]:
    """Return a request with an empty prompt."""
    kind = urgency.later_s, urgency.is_interactive, urgency.is_batch
    return Held(_answer(), now_s, 0.0, *kind, sharer)


def _answer() -> Answer:
    return asyncio.get_running_loop().create_future()
