"""Waits until requests may be sent to a replica, or refuses them.

Requests are sent in the order of their order times (queue.py). They do not wait while some replica
is not busy, that is, has less pending prefill than Queue.busy_backlog_s.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct

from kvroute.contract.priority import BATCH_S, Priority
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import (
    Placement,
    RequestContext,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import NO_WAIT, QueueReason, QueueRefusal, Urgency, Wait
from kvroute.router.queueing.forecast import ArrivalRates, Correction, Margin
from kvroute.router.queueing.queue import (
    Queue,
    QueuedRequest,
    QueueState,
)
from kvroute.router.queueing.refusals import no_replica, queue_full, too_long
from kvroute.router.queueing.wake import Wake

WAITING = 4096  # the most requests that may wait, besides batch requests; further ones get a 429
# The most batch requests that may wait. It is smaller than the default of --max-requests, the limit
# of all open requests, so that other requests are still accepted.
WAITING_BATCH = 500
RECOVERY_S = 60.0  # seconds that requests wait for a replica while no replica runs
REFUSED_S = 5.0  # seconds for which a refused request's wait is reported to autoscaling
MAX_REFUSED_S = 60.0  # the longest wait that is reported for refused requests, in seconds
FRESH_S = 0.01  # seconds for which a forecast for an empty prompt is reused
# A request that is refused after a wait would have waited longer. So its measured wait is
# multiplied by this before the correction learns from it.
OVERDUE = 2.0

Verdict = asyncio.Future[QueueRefusal | None]  # why the request is refused; None: it may be sent


class Admitted(Struct, frozen=True):
    """The permission to send a request to a replica."""

    order_s: float  # order time, by which the engine's queue is sorted too; on this router's clock
    wait: Wait = NO_WAIT  # the request's wait in the queue
    allowed_ids: Sequence[str] = ()  # the replicas that may get the request; empty: all
    is_in_lane: bool = False  # whether it gives way to others at the replica
    refused_s: float = 0.0  # wait of the last request refused within REFUSED_S; 0: none

    @property
    def missed_s(self) -> float:
        """Return the wait to report to autoscaling; 0 for batch requests, which may wait."""
        return 0.0 if self.wait.priority == "batch" else max(self.wait.waited_s, self.refused_s)


class Holding:
    """One router's waiting requests for one model.

    Args:
        trusted: returns the replicas that take requests.
        wake: is set when a replica may be able to take a request.
        routers: returns the number of routers, including this one.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        queue: Queue[Verdict],
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
        self._seen_s = 0.0  # time at which a replica last ran
        self._refused = (0.0, -math.inf)  # wait of the last refused request, and time of refusal
        self._arrivals = ArrivalRates(lambda: fleet.loads.scale.busy_s)
        self._correction = Correction(fleet.loads.scale.busy_s)
        self._margin = Margin()
        # Forecasts for an empty prompt, by (delay_s, priority, tenant whose share is used). All
        # were computed at about the time _forecast_s.
        self._forecasts: dict[tuple[float, Priority, str], float] = {}
        self._forecast_s = -math.inf

    def states(self) -> Mapping[str, QueueState]:
        """Return the state of the queue's lines, by name."""
        return self._queue.state(self._clock())

    @property
    def margin(self) -> float:
        """Return the factor that a forecast is multiplied by before it is compared with a limit."""
        return self._margin.factor

    # Admission of a request.

    async def admit(self, placement: Placement, context: RequestContext) -> Admitted:
        """Wait until the request may be sent. It does not wait while a replica is not busy.

        Raises:
            ApiError: the request has waited too long, or is expected to wait too long.
        """
        now_s, urgency, best = self._clock(), context.urgency, placement.ranking[0]
        queued = _queued(
            urgency,
            arrived_s=context.ready_s,
            prefill_s=best.own_s + best.copy_s + best.setup_s,
            holder_id=placement.holder_id,
        )
        queued.place = partial(self._fleet.place_batch, placement)
        least_s = min([candidate.backlog_s for candidate in placement.ranking])
        if self._queue.is_free(queued, least_s):
            order_s = self._queue.order_s(queued)
            self._arrivals.add(queued.prefill_s, order_s - queued.arrived_s, now_s)
            self._queue.sent(queued, now_s)
            refused_s = self._refused_s(now_s)
            return Admitted(order_s, Wait(urgency.priority), refused_s=refused_s)
        if queued.is_batch and not self._queue and self._has_room(queued, now_s):
            return self._admitted(queued, Wait(urgency.priority), now_s)
        raw_s = self._raw_forecast_s(queued, len(placement.ranking), least_s, now_s)
        forecast_s = self._correction.factor * raw_s
        self._check(urgency, forecast_s)
        if self._is_full(queued):
            raise self._refusal(urgency, "full", forecast_s)
        if not queued.is_batch:  # batch requests never pass others
            self._arrivals.add(
                queued.prefill_s, self._queue.order_s(queued) - queued.arrived_s, now_s
            )
        self._queue.add(queued)
        refusal = await self._wait(queued, urgency.max_wait_s)
        end_s = self._clock()
        waited_s = end_s - now_s
        if refusal != "no_replica" and not queued.was_background:
            self._correction.learn(raw_s, waited_s * (OVERDUE if refusal else 1.0))
            if urgency.requested_wait_s is None:
                self._margin.learn(forecast_s / urgency.max_wait_s, is_late=refusal is not None)
        if refusal is not None:
            raise self._refusal(urgency, refusal, waited_s, self._empty_wait_s(urgency))
        wait = Wait(urgency.priority, self._reason(queued, least_s), waited_s, forecast_s)
        self._fleet.observer.waited(wait)
        return self._admitted(queued, wait, end_s)

    def _has_room(self, queued: QueuedRequest[Verdict], now_s: float) -> bool:
        """Return whether a batch request may be sent at once, since no other request waits."""
        self._queue.add(queued)
        if self._pop_next(self._trusted()) is queued:
            return True
        self._queue.remove(queued)
        return False

    def _reason(self, queued: QueuedRequest[Verdict], least_s: float) -> QueueReason:
        """Return why a request has waited.

        Args:
            least_s: the smallest backlog of any replica when it arrived.
        """
        if queued.is_batch and not queued.is_promoted:
            return "room"
        return "busy" if least_s >= self._queue.busy_backlog_s else "order"

    def _admitted(self, queued: QueuedRequest[Verdict], wait: Wait, now_s: float) -> Admitted:
        """Return the permission of a request that has left the queue."""
        self._queue.sent(queued, now_s)
        # Only background requests have `allowed_ids`. They are ordered later in the engines, too.
        delay_s = BATCH_S if queued.allowed_ids else 0.0
        return Admitted(
            order_s=queued.order_s + delay_s,
            wait=wait,
            allowed_ids=queued.allowed_ids,
            is_in_lane=queued.is_batch and not queued.is_promoted,
            refused_s=self._refused_s(now_s),
        )

    def _is_full(self, queued: QueuedRequest[Verdict]) -> bool:
        """Return whether the limit of waiting requests is reached for this kind of request."""
        if queued.is_batch:
            return self._queue.batch >= WAITING_BATCH
        return len(self._queue) - self._queue.batch >= WAITING

    def check(self, urgency: Urgency) -> None:
        """Check that even an empty prompt would not wait too long.

        This takes microseconds, so that an overloaded router refuses requests without tokenising
        them.

        Args:
            urgency: the request's priority and wait limit.

        Raises:
            ApiError: even an empty prompt is expected to wait too long.
        """
        if urgency.max_wait_s < math.inf:
            self._check(urgency, self._empty_wait_s(urgency))

    def overdue(self, urgency: Urgency, waited_s: float) -> ApiError:
        """Return the error for a request that waited up to its limit in the queue of an engine.

        A request that arrives now is expected to wait as long.

        Args:
            urgency: its priority and wait limit.
            waited_s: the seconds that it has waited, in this queue and in the engine's.
        """
        return self._refusal(urgency, "deadline", waited_s, waited_s)

    async def _wait(self, queued: QueuedRequest[Verdict], within_s: float) -> QueueRefusal | None:
        """Wait until the request has left the queue; return why it is refused, or None."""
        answer = queued.request
        timer = None
        if within_s < math.inf:
            timer = asyncio.get_running_loop().call_later(within_s, self._overdue, queued)
        self._seen_s = max(self._seen_s, self._clock())
        self._has_waiting.set()
        self._wake.set()
        try:
            return await answer
        finally:
            if timer:
                timer.cancel()
            if answer.cancelled():  # the client has disconnected
                self._queue.remove(queued)

    def _overdue(self, queued: QueuedRequest[Verdict]) -> None:
        self._refuse(queued, "deadline" if self._trusted() else "no_replica")

    def _refuse(self, queued: QueuedRequest[Verdict], refusal: QueueRefusal) -> None:
        if not queued.request.done() and self._queue.remove(queued):
            queued.request.set_result(refusal)

    # Release of waiting requests.

    async def run(self) -> None:
        """Release waiting requests in their order, until cancelled."""
        while True:
            await self._has_waiting.wait()
            while self._queue:
                await self._release()
                await self._wake.wait(self._queue.wake_s)
            self._has_waiting.clear()

    async def _release(self) -> None:
        """Release all requests that may be sent now."""
        replicas = self._replicas()
        while self._queue and (queued := self._pop_next(replicas)):
            if not queued.request.done():
                queued.request.set_result(None)
            await asyncio.sleep(0)  # lets the request be sent, so that it counts as load
            replicas = self._trusted()

    def _pop_next(self, replicas: Sequence[str]) -> QueuedRequest[Verdict] | None:
        now_s, lanes = self._clock(), self._queue.batch > 0
        capacities = self._fleet.loads.capacities(replicas, now_s, lanes=lanes)
        return self._queue.pop_next(capacities, now_s)

    def _replicas(self) -> list[str]:
        """Return the replicas that take requests.

        If there was none for RECOVERY_S, refuse all waiting requests.
        """
        replicas, now_s = self._trusted(), self._clock()
        if replicas:
            self._seen_s = now_s
        elif now_s - self._seen_s >= RECOVERY_S:
            for queued in [*self._queue]:
                self._refuse(queued, "no_replica")
        return replicas

    # Forecasts.

    def _raw_forecast_s(
        self, queued: QueuedRequest[Verdict], replicas: int, least_s: float, now_s: float
    ) -> float:
        """Return the predicted wait of a request, without the correction.

        Args:
            replicas: number of replicas.
            least_s: the smallest backlog of any replica.
        """
        routers = self._routers()
        sooner = [routers * rate for rate in self._arrivals.sooner(now_s)]
        queued_s = self._queue.forecast_s(queued, replicas=replicas, sooner=sooner, now_s=now_s)
        return max(0.0, least_s - self._queue.busy_backlog_s) + queued_s

    def _empty_wait_s(self, urgency: Urgency) -> float:
        """Return how many seconds an empty prompt would wait; a recent result is reused."""
        now_s, kind = self._clock(), (urgency.delay_s, urgency.priority, urgency.sharer)
        if now_s - self._forecast_s > FRESH_S:
            self._forecasts.clear()
            self._forecast_s = now_s
        if kind not in self._forecasts:
            empty = _queued(urgency, arrived_s=now_s)
            self._forecasts[kind] = self._forecast_empty_s(empty, now_s)
        return self._forecasts[kind]

    def _forecast_empty_s(self, empty: QueuedRequest[Verdict], now_s: float) -> float:
        """Compute how many seconds an empty prompt would wait."""
        replicas = self._trusted()
        least_s = min(self._fleet.loads.backlogs_s(replicas, now_s), default=0.0)
        if not replicas or self._queue.is_free(empty, least_s):
            return 0.0
        return self._correction.factor * self._raw_forecast_s(empty, len(replicas), least_s, now_s)

    # Refusals.

    def _refused_s(self, now_s: float) -> float:
        """Return the wait of the latest refused request; 0 if none was refused recently.

        It is reported to the replicas. For long waits, autoscaling adds replicas.
        """
        wait_s, refused_at_s = self._refused
        return wait_s if now_s - refused_at_s < REFUSED_S else 0.0

    def _check(self, urgency: Urgency, forecast_s: float) -> None:
        upper_s = self._margin.factor * forecast_s
        if upper_s > urgency.max_wait_s:
            raise self._refusal(urgency, "forecast", upper_s)

    def _refusal(
        self, urgency: Urgency, refusal: QueueRefusal, wait_s: float, then_s: float = 0.0
    ) -> ApiError:
        """Count a refusal and return its error.

        Args:
            wait_s: the predicted wait of the request, or its wait so far.
            then_s: the predicted wait of an empty prompt that arrives now.
        """
        self._fleet.observer.rejected(urgency.priority, refusal)
        if refusal == "no_replica":
            return no_replica()
        if not urgency.is_batch and urgency.requested_wait_s is None:
            self._refused = (min(wait_s, MAX_REFUSED_S), self._clock())
        if refusal == "full":
            return queue_full()
        if refusal == "deadline":
            return too_long(urgency, f"has waited {wait_s:.3g} s", then_s)
        return too_long(urgency, f"would wait up to {wait_s:.3g} s", wait_s)


def _queued(
    urgency: Urgency, *, arrived_s: float, prefill_s: float = 0.0, holder_id: str = ""
) -> QueuedRequest[Verdict]:
    """Return a request as an item of the queue; by default, one with an empty prompt."""
    return QueuedRequest(
        request=asyncio.get_running_loop().create_future(),
        arrived_s=arrived_s,
        prefill_s=prefill_s,
        priority_s=urgency.delay_s,
        is_interactive=urgency.is_interactive,
        is_batch=urgency.is_batch,
        tenant=urgency.sharer,
        holder_id=holder_id,
    )
