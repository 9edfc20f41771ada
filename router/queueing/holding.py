"""The wait of requests until it is their turn to go to a replica, or until they are refused.

The order is that of queue.py. While a replica has room, requests pass without a wait.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kvroute.contract.priority import Priority
from kvroute.router.admission.waits import NO_WAIT, Reason, Refusal, Urgency, Wait
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import (
    Placement,
    RequestContext,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.forecast import ArrivalRates, Correction, Margin
from kvroute.router.queueing.queue import (
    BATCH_S,
    Queue,
    QueuedRequest,
    QueueState,
)
from kvroute.router.queueing.refusals import no_replica, queue_full, too_long
from kvroute.router.queueing.wake import Wake

WAITING = 4096  # requests that may wait; further ones get a 429
WAITING_BATCH = 500  # batch requests that may wait; below --max-requests, which counts all
RECOVERY_S = 60.0  # the longest wait while no replica runs
REFUSED_S = 5.0  # a refusal counts as a lack of replicas for this long
MAX_REFUSED_S = 60.0  # the longest wait that a refusal counts as
FRESH_S = 0.01  # a forecast for empty prompts is used again for this long
OVERDUE = 2.0  # a refused request is taken to have needed this multiple of its wait

Answer = asyncio.Future[Refusal | None]  # None: it is its turn


class Admitted(Struct, frozen=True):
    """The permission for a request to go to a replica."""

    at_s: float  # place in the engines' order, as a time on this router's clock
    wait: Wait = NO_WAIT
    among: Sequence[str] = ()  # the replicas that it may go to; empty: all
    refused_s: float = 0.0  # the wait of requests that were just refused

    @property
    def missed_s(self) -> float:
        """Return how long replicas were missing. Batch requests do not ask for more replicas."""
        return 0.0 if self.wait.priority == "batch" else max(self.wait.waited_s, self.refused_s)


class Holding:
    """One router's waiting requests for one model.

    Args:
        trusted: returns the replicas that take requests.
        wake: rings when replicas may have room.
        routers: returns the number of routers, including this one.
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
        self._seen_s = 0.0  # when a replica last ran
        self._refused = (0.0, -math.inf)  # wait of the last refused request, and when
        self._arrivals = ArrivalRates(lambda: fleet.loads.scale.busy_s)
        self._correction = Correction(fleet.loads.scale.busy_s)
        self._margin = Margin()
        # The wait of an empty prompt by (later_s, priority, sharer), as of _forecast_s.
        self._forecasts: dict[tuple[float, Priority, str], float] = {}
        self._forecast_s = -math.inf

    def states(self) -> Mapping[str, QueueState]:
        """Return the state of the queue's lines, by their names."""
        return self._queue.state(self._clock())

    @property
    def correction(self) -> float:
        """Return the factor that corrects forecasts by the errors of earlier ones."""
        return self._correction.factor

    @property
    def margin(self) -> float:
        """Return the factor by which forecasts must stay below a request's limit."""
        return self._margin.factor

    # Entering.

    async def turn(self, placement: Placement, context: RequestContext) -> Admitted:
        """Return when it is the request's turn, at once while a replica has room for it.

        Raises:
            ApiError: the request waits too long, or would.
        """
        now_s, urgency = self._clock(), context.urgency
        held = _held(placement, context)
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        if self._queue.is_free(held, least_s):
            self._arrivals.add(held.prefill_s, self._queue.turn_s(held) - held.arrived_s, now_s)
            self._queue.sent(held, now_s)
            refused_s = self._refused_s(now_s)
            return Admitted(self._queue.turn_s(held), Wait(urgency.priority), refused_s=refused_s)
        raw_s = self._raw_forecast_s(held, len(placement.ranking), least_s, now_s)
        forecast_s = self._correction.factor * raw_s
        self._check(urgency, forecast_s)
        if self._is_full(held):
            raise self._refusal(urgency, "full", forecast_s)
        if not held.is_batch:  # batch requests never pass others
            self._arrivals.add(held.prefill_s, self._queue.turn_s(held) - held.arrived_s, now_s)
        self._queue.add(held)
        refusal = await self._released(held, urgency.max_wait_s)
        later_s = self._clock()
        waited_s = later_s - now_s
        if refusal != "no_replica" and not held.was_background:
            self._correction.learn(raw_s, waited_s * (OVERDUE if refusal else 1.0))
            if urgency.requested_wait_s is None:
                self._margin.learn(forecast_s / urgency.max_wait_s, is_late=refusal is not None)
        if refusal is not None:
            raise self._refusal(urgency, refusal, waited_s, self._least_s(urgency, held.tenant))
        self._queue.sent(held, later_s)
        reason: Reason = "busy" if least_s >= self._queue.hold_s else "order"
        wait = Wait(urgency.priority, reason, waited_s, forecast_s)
        self._fleet.observer.waited(wait)
        behind_s = (
            BATCH_S if held.among else 0.0
        )  # background requests come later in the engines too
        return Admitted(held.turn_s + behind_s, wait, held.among, self._refused_s(later_s))

    def _is_full(self, held: QueuedRequest[Answer]) -> bool:
        """Return whether as many requests of the same kind wait as may."""
        if held.is_batch:
            return self._queue.batch >= WAITING_BATCH
        return len(self._queue) - self._queue.batch >= WAITING

    def check(self, urgency: Urgency, sharer: str) -> None:
        """Raise ApiError if even an empty prompt would wait too long; takes microseconds."""
        if urgency.max_wait_s < math.inf:
            self._check(urgency, self._least_s(urgency, sharer))

    async def _released(self, held: QueuedRequest[Answer], within_s: float) -> Refusal | None:
        """Return when the request has left the queue: why it is refused; None: it may go."""
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

    def _overdue(self, held: QueuedRequest[Answer]) -> None:
        self._expire(held, "deadline" if self._trusted() else "no_replica")

    def _expire(self, held: QueuedRequest[Answer], refusal: Refusal) -> None:
        if not held.request.done() and self._queue.remove(held):
            held.request.set_result(refusal)

    # Leaving.

    async def run(self) -> None:
        """Let requests go, each in its turn, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._queue:
                await self._release()
                await self._wake.next(self._queue.wake_s)
            self._has_waiting.clear()

    async def _release(self) -> None:
        """Let all requests go whose turn it is now."""
        replicas = self._replicas()
        while self._queue and (held := self._due(replicas)):
            if not held.request.done():
                held.request.set_result(None)
            await asyncio.sleep(0)  # let the request be sent, so that it counts as load
            replicas = self._trusted()

    def _due(self, replicas: Sequence[str]) -> QueuedRequest[Answer] | None:
        now_s = self._clock()
        return self._queue.due(self._fleet.loads.capacities(replicas, now_s), now_s)

    def _replicas(self) -> list[str]:
        """Return the replicas that take requests. After RECOVERY_S without one, refuse all."""
        replicas, now_s = self._trusted(), self._clock()
        if replicas:
            self._seen_s = now_s
        elif now_s - self._seen_s >= RECOVERY_S:
            for held in [*self._queue]:
                self._expire(held, "no_replica")
        return replicas

    # Forecasts.

    def _raw_forecast_s(
        self, held: QueuedRequest[Answer], replicas: int, least_s: float, now_s: float
    ) -> float:
        """Return the forecast wait of a request, without the correction.

        Args:
            least_s: the least backlog of any replica.
        """
        routers = self._routers()
        sooner = [routers * rate for rate in self._arrivals.sooner(now_s)]
        turn_s = self._queue.forecast_s(held, replicas=replicas, sooner=sooner, now_s=now_s)
        return max(0.0, least_s - self._queue.hold_s) + turn_s

    def _least_s(self, urgency: Urgency, sharer: str) -> float:
        """Return how long an empty prompt would wait."""
        now_s, kind = self._clock(), (urgency.delay_s, urgency.priority, sharer)
        if now_s - self._forecast_s > FRESH_S:
            self._forecasts.clear()
            self._forecast_s = now_s
        if kind not in self._forecasts:
            empty = _empty(urgency, sharer, now_s)
            self._forecasts[kind] = self._empty_s(empty, now_s)
        return self._forecasts[kind]

    def _empty_s(self, empty: QueuedRequest[Answer], now_s: float) -> float:
        """Compute how long an empty prompt would wait."""
        replicas = self._trusted()
        least_s = min(self._fleet.loads.backlogs_s(replicas, now_s), default=0.0)
        if not replicas or self._queue.is_free(empty, least_s):
            return 0.0
        return self._correction.factor * self._raw_forecast_s(empty, len(replicas), least_s, now_s)

    # Refusing.

    def _refused_s(self, now_s: float) -> float:
        """Return the wait of the latest refused request; 0: none was refused lately.

        It goes to the replicas, which ask for more replicas by it.
        """
        wait_s, at_s = self._refused
        return wait_s if now_s - at_s < REFUSED_S else 0.0

    def _check(self, urgency: Urgency, forecast_s: float) -> None:
        most_s = self._margin.factor * forecast_s
        if most_s > urgency.max_wait_s:
            raise self._refusal(urgency, "forecast", most_s)

    def _refusal(
        self, urgency: Urgency, refusal: Refusal, wait_s: float, then_s: float = 0.0
    ) -> ApiError:
        """Count a refusal and return its error.

        Args:
            wait_s: the request's wait, as it is forecast or as it was.
            then_s: the wait of an empty prompt that comes now.
        """
        self._fleet.observer.turned_away(urgency.priority, refusal)
        if refusal == "no_replica":
            return no_replica()
        if not urgency.is_batch and urgency.requested_wait_s is None:
            self._refused = (min(wait_s, MAX_REFUSED_S), self._clock())
        if refusal == "full":
            return queue_full()
        if refusal == "deadline":
            return too_long(urgency, f"has waited {wait_s:.3g} s", then_s)
        return too_long(urgency, f"would wait up to {wait_s:.3g} s", wait_s)


def _held(placement: Placement, context: RequestContext) -> QueuedRequest[Answer]:
    best, urgency = placement.ranking[0], context.urgency
    return QueuedRequest(
        request=_answer(),
        arrived_s=context.at_s,
        prefill_s=best.own_s + best.copy_s + best.lora_s,
        priority_s=urgency.delay_s,
        is_interactive=urgency.is_interactive,
        is_batch=urgency.is_batch,
        tenant=context.sharer,
        home=placement.home,
    )


def _empty(urgency: Urgency, sharer: str, now_s: float) -> QueuedRequest[Answer]:
    """Return a request with an empty prompt."""
    return QueuedRequest(
        request=_answer(),
        arrived_s=now_s,
        prefill_s=0.0,
        priority_s=urgency.delay_s,
        is_interactive=urgency.is_interactive,
        is_batch=urgency.is_batch,
        tenant=sharer,
    )


def _answer() -> Answer:
    return asyncio.get_running_loop().create_future()
