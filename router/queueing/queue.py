"""The queue of one router for one model: its order, and when its requests are sent.

This module only computes: it uses no clock and no socket. Times are seconds of a monotonic clock.

    order time = arrival + priority + DELAY x prefill

Here, `arrival` is the time of the request's arrival, `priority` the seconds that its priority adds,
and `prefill` its predicted prefill time. The order time of interactive requests is earlier by
INTERACTIVE. Requests are sent in the order of their order times, so short prompts pass long ones.
But a prompt of `prefill` seconds is only passed by prompts of its priority that arrive at most
DELAY x prefill seconds after it. So no prompt is passed forever.

Background requests are batch requests, and requests of a tenant that has recently used more than
its share of the fleet's time. They wait in lines of their own; all other requests wait in the
default line. While the default line is empty, requests of tenants above their share are sent to
replicas that are nearly idle and have free memory. Batch requests are sent while replicas have room
for them, whatever waits in the default line (lane.py). After BATCH_S a background request is
promoted to the default line.

Each router publishes the order times of its waiting requests to the other routers. Before a router
sends the request at the front of its queue, it counts the requests of other routers with an earlier
order time. If these are n requests, it sends its own only while more than n replicas can take a
request. Routers may disagree about which replicas can take a request. So if a replica was able to
take a request for PATIENCE_S, and no other router sent it one, the router sends its request without
counting.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from kvroute.contract.messages import Waiting
from kvroute.contract.priority import BATCH_S
from kvroute.router.placement.loads import ReplicaCapacity
from kvroute.router.queueing.forecast import waiting_s
from kvroute.router.queueing.lane import Lane, Place
from kvroute.router.queueing.shares import Shares

# Some constants are multiples of Scale.busy_s, the fleet's unit of time (placement/scale.py).

BUSY_BACKLOG = 0.45  # requests wait while every replica has at least this backlog, in Scale.busy_s
# Requests of tenants above their share go to replicas with a smaller backlog, in Scale.busy_s, and
# with a larger free share of the KV cache.
IDLE_BACKLOG, SPARE_SHARE = 0.11, 0.5
DELAY = 40.0  # seconds by which each second of prefill delays a request's order time
INTERACTIVE = 14.0  # interactive requests are ordered this much earlier, in Scale.busy_s
# Only this many requests at the front of a line are examined: for a prompt that an idle replica has
# cached, and for the tenants that wait.
LOOKED_AT = 64
DIVIDE_S = 1.0  # seconds between two checks of which tenants are above their share
# Order times are published again after this many seconds, so that new routers get them.
AGAIN_S = 0.9
# For this many seconds, a free replica is left to other routers with earlier requests.
PATIENCE_S = 0.4
STALE_S = 1.0  # seconds after which a router's last check of the replicas is outdated
WAKE = 0.01  # time between two checks of the replicas while requests wait, in Scale.busy_s
MIN_WAKE_S, MAX_WAKE_S = 0.005, 0.1  # bounds of that time, which keep the router's CPU use low
PUBLISHED = (*range(1, 17), *(2**k for k in range(5, 15)))  # positions that are published, from 1

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[R]):
    """A request that waits in the queue, or that is about to join it."""

    request: R  # the caller's object for the request; the queue does not use it
    arrived_s: float  # time of its arrival
    prefill_s: float  # predicted prefill time on the best replica
    priority_s: float = 0.0  # seconds that the client's priority adds to the order time
    is_interactive: bool = False
    is_batch: bool = False  # true: a batch request, which waits in the background
    tenant: str = ""  # the tenant whose share the request uses; empty: it uses no share
    # The replica that has most of its prompt cached; empty: no replica has a large part.
    holder_id: str = ""
    place: Place | None = None  # ranks replicas for it again; batch requests have it
    order_s: float = 0.0  # set by the queue: the order time
    was_background: bool = False  # set by the queue: it has waited as a background request
    is_promoted: bool = False  # set by the queue: it was promoted to the default line
    allowed_ids: Sequence[str] = ()  # set by the queue: the replicas that may get it; empty: all


@dataclass(frozen=True, slots=True)
class QueueState:
    """Length and age of one of this router's lines."""

    requests: int = 0  # number of requests
    prefill_s: float = 0.0  # seconds of prefill of all requests
    oldest_s: float = 0.0  # seconds that the oldest request has waited


class _Line(Generic[R]):
    """Requests in the order of their order times."""

    def __init__(self) -> None:
        self.requests: list[QueuedRequest[R]] = []

    def add(self, queued: QueuedRequest[R]) -> None:
        insort(self.requests, queued, key=_order)

    def remove(self, queued: QueuedRequest[R]) -> bool:
        """Remove a request. Return False if it is not in this line."""
        index = bisect_left(self.requests, queued.order_s, key=_order)
        while index < len(self.requests) and self.requests[index].order_s == queued.order_s:
            if self.requests[index] is queued:
                del self.requests[index]
                return True
            index += 1
        return False


class Queue(Generic[R]):
    """One router's waiting requests for one model.

    Args:
        busy_s: returns Scale.busy_s, the fleet's unit of time in seconds.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self.on_change: Callable[[], object] = lambda: None  # is called when the queue changes
        self._line = _Line[R]()
        self._above = _Line[R]()  # background requests of tenants above their share
        self._batch = Lane[QueuedRequest[R]](busy_s)
        self._shares = Shares()
        # Other routers' waiting requests, by router. Order times are on this router's clock.
        self._others: dict[str, Waiting] = {}
        self._has_changed = False  # true if the queue has changed since it was published
        self._published_s = -math.inf  # time at which the queue was last published
        self._divided_s = -math.inf  # time at which shares were last checked
        self._looked_s = -math.inf  # time at which the first request was last considered
        # Replicas that can take a request -> time since which no other router has sent them one.
        self._open_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._line.requests) + self.background

    def __iter__(self) -> Iterator[QueuedRequest[R]]:
        yield from self._line.requests
        yield from self._above.requests
        yield from self._batch

    @property
    def batch(self) -> int:
        """Return the number of waiting batch requests, without promoted ones."""
        return len(self._batch)

    @property
    def background(self) -> int:
        """Return the number of waiting background requests."""
        return len(self._above.requests) + self.batch

    @property
    def busy_backlog_s(self) -> float:
        """Return the backlog at which a replica is busy. Requests wait while all are busy."""
        return BUSY_BACKLOG * self._busy_s()

    @property
    def wake_s(self) -> float:
        """Return the seconds between two checks of the replicas while requests wait."""
        return min(MAX_WAKE_S, max(MIN_WAKE_S, WAKE * self._busy_s()))

    def order_s(self, queued: QueuedRequest[R]) -> float:
        """Return the order time of a request; the module's docstring has the formula.

        Batch requests keep the order in which their sender sends them.
        """
        if queued.is_batch and not queued.is_promoted:
            return queued.arrived_s + queued.priority_s
        order_s = queued.arrived_s + queued.priority_s + DELAY * queued.prefill_s
        return order_s - INTERACTIVE * self._busy_s() if queued.is_interactive else order_s

    def is_free(self, queued: QueuedRequest[R], backlog_s: float) -> bool:
        """Return whether a new request can be sent at once.

        Args:
            backlog_s: the smallest backlog of any replica.
        """
        is_first = not (self._line.requests or self._others)
        is_free = backlog_s < self.busy_backlog_s
        return is_first and is_free and not self._is_background(queued)

    def add(self, queued: QueuedRequest[R]) -> None:
        """Add a request to its line."""
        queued.order_s = self.order_s(queued)
        self._put(queued)
        self._changed()

    def remove(self, queued: QueuedRequest[R]) -> bool:
        """Remove a request. Return False if it is not in the queue."""
        self._changed()
        if self._batch.remove(queued, queued.order_s):
            return True
        return any(line.remove(queued) for line in (self._line, self._above))

    def sent(self, queued: QueuedRequest[R], now_s: float) -> None:
        """Count a request that is sent to a replica, whether it has waited or not."""
        self._shares.use(queued.tenant, queued.prefill_s, now_s)

    def pop_next(
        self, replicas: Sequence[ReplicaCapacity], now_s: float
    ) -> QueuedRequest[R] | None:
        """Remove and return the next request to send; None if no request may be sent yet.

        Args:
            replicas: the replicas that take requests.
        """
        self._shares.note_waiting(
            [queued.tenant for queued in self._line.requests[:LOOKED_AT]], now_s
        )
        self._divide(now_s)
        self._promote(now_s)
        if self._line.requests:
            queued = self._line.requests[0] if self._may_send(replicas, now_s) else None
        else:
            queued = self._next_above(replicas)
        if queued is not None:
            self.remove(queued)
            return queued
        return self._next_batch(replicas, now_s)

    def _put(self, queued: QueuedRequest[R]) -> None:
        queued.was_background |= self._is_background(queued)
        if self._is_in_lane(queued):
            assert queued.place is not None, "batch requests are placed again and again"
            self._batch.add(queued, queued.order_s, queued.place)
        else:
            self._line_of(queued).add(queued)

    def _is_background(self, queued: QueuedRequest[R]) -> bool:
        return self._is_in_lane(queued) or self._line_of(queued) is not self._line

    def _is_in_lane(self, queued: QueuedRequest[R]) -> bool:
        return queued.is_batch and not queued.is_promoted

    def _line_of(self, queued: QueuedRequest[R]) -> _Line[R]:
        """Return the line of a request that is not in the batch lane."""
        if queued.is_promoted:
            return self._line
        return self._above if self._shares.are_exceeded(queued.tenant) else self._line

    def _divide(self, now_s: float) -> None:
        """Move requests between lines, since the tenants' shares have changed."""
        if now_s - self._divided_s < DIVIDE_S:
            return
        self._divided_s = now_s
        waiting = [*self._line.requests, *self._above.requests]
        self._line.requests.clear()
        self._above.requests.clear()
        for queued in waiting:
            self._put(queued)
        self._changed()

    def _promote(self, now_s: float) -> None:
        """Move background requests that have waited for BATCH_S to the default line."""
        above = self._above.requests
        promoted = [*self._batch.pop_before(now_s - BATCH_S)]
        while above and above[0].order_s + BATCH_S < now_s:
            promoted.append(above.pop(0))
        for queued in promoted:
            queued.is_promoted = True
            queued.order_s = self.order_s(queued) + BATCH_S
            self._put(queued)

    def _may_send(self, replicas: Sequence[ReplicaCapacity], now_s: float) -> bool:
        """Return whether the first request of the default line may be sent now.

        Either it comes early enough among the requests of all routers, or the other routers have
        left a replica unused for PATIENCE_S.
        """
        limit_s = self.busy_backlog_s
        open_ids = [replica.replica_id for replica in replicas if replica.backlog_s < limit_s]
        is_first = self._before(self._line.requests[0].order_s) < len(open_ids)
        if is_first or now_s - self._looked_s > STALE_S:
            self._open_s.clear()
        self._looked_s = now_s
        if is_first:
            return True
        self._open_s = {open_id: self._open_s.get(open_id, now_s) for open_id in open_ids}
        return now_s - min(self._open_s.values(), default=now_s) > PATIENCE_S

    def _next_batch(
        self, replicas: Sequence[ReplicaCapacity], now_s: float
    ) -> QueuedRequest[R] | None:
        """Remove and return the batch request to send now, and set its `allowed_ids`."""
        if not self._batch or (found := self._batch.pop_next(replicas, now_s)) is None:
            return None
        queued, replica_id = found
        queued.allowed_ids = [replica_id]
        self._changed()
        return queued

    def _next_above(self, replicas: Sequence[ReplicaCapacity]) -> QueuedRequest[R] | None:
        """Return the next request of the tenants above their share; None if none may be sent now.

        It is the first request whose prompt is cached on an idle replica or on no replica. If the
        first LOOKED_AT requests have no such request, it is the first one. Its `allowed_ids` are
        set.
        """
        line = self._above
        if not line.requests or self._others:
            return None
        idle = [
            replica.replica_id
            for replica in replicas
            if replica.backlog_s < IDLE_BACKLOG * self._busy_s()
            and replica.free_share > SPARE_SHARE
        ]
        if not idle:
            return None
        first = line.requests[:LOOKED_AT]
        fits = (queued for queued in first if not queued.holder_id or queued.holder_id in idle)
        queued = next(fits, first[0])
        queued.allowed_ids = idle
        return queued

    def _changed(self) -> None:
        self._has_changed = True
        self.on_change()

    def _before(self, order_s: float) -> int:
        """Return the number of requests of other routers with an earlier order time."""
        return sum(_position(waiting, order_s) for waiting in self._others.values())

    # Forecast.

    def forecast_s(
        self, queued: QueuedRequest[R], *, replicas: int, sooner: Sequence[float], now_s: float
    ) -> float:
        """Return how many seconds a new request will wait.

        Args:
            replicas: number of replicas.
            sooner: the work that arrives at all routers; see ArrivalRates.sooner.
        """
        order_s = self.order_s(queued)
        ahead_s = sum(_work_s(waiting, order_s) for waiting in self._others.values())
        ahead_s += _sooner_s(self._line.requests, order_s)
        if self._is_in_lane(queued):
            ahead_s += sum(each.prefill_s for each in self._batch if each.order_s < order_s)
        elif (line := self._line_of(queued)) is not self._line:
            ahead_s += _sooner_s(line.requests, order_s)
        return waiting_s(ahead_s, order_s - now_s, sooner, replicas, self._busy_s())

    def state(self, now_s: float) -> dict[str, QueueState]:
        """Return the state of the lines, by name. Other threads may call this."""
        lines = {
            "default": [*self._line.requests],
            "filling": [*self._above.requests, *self._batch],  # background requests
        }
        return {name: _state(requests, now_s) for name, requests in lines.items()}

    # The other routers.

    def in_other_routers(self) -> QueueState:
        """Return the state of the other routers' queues together. The ages are unknown."""
        others = self._others.values()
        return QueueState(
            sum(waiting.places[-1] for waiting in others),
            sum(waiting.work_s[-1] for waiting in others),
        )

    def report(self, now_s: float) -> Waiting | None:
        """Return what to publish to other routers; None if nothing has to be published.

        Order times are relative to `now_s`, since the routers' clocks differ.
        """
        requests = self._line.requests
        if not self._has_changed and now_s - self._published_s < AGAIN_S:
            return None
        self._has_changed, self._published_s = False, now_s
        work_s = [*accumulate(request.prefill_s for request in requests)]
        places = [*(n for n in PUBLISHED if n < len(requests)), len(requests)] if requests else []
        return Waiting(
            places,
            [requests[n - 1].order_s - now_s for n in places],
            [work_s[n - 1] for n in places],
        )

    def receive(self, router: str, waiting: Waiting, now_s: float) -> None:
        """Record what another router has just published about its queue."""
        if not waiting.places:
            self.forget(router)
            return
        orders_s = [now_s + order_s for order_s in waiting.turns_s]
        self._others[router] = Waiting(waiting.places, orders_s, waiting.work_s)

    def taken(self, replica_id: str) -> None:
        """Record that another router has just sent the replica a request."""
        self._open_s.pop(replica_id, None)

    def forget(self, router: str) -> None:
        """Forget a router that has left, or that has no waiting requests."""
        self._others.pop(router, None)


def _sooner_s(line: Sequence[QueuedRequest[R]], order_s: float) -> float:
    """Return the prefill time of the requests with an earlier order time."""
    return sum(queued.prefill_s for queued in line[: bisect_left(line, order_s, key=_order)])


def _order(queued: QueuedRequest[R]) -> float:
    return queued.order_s


def _position(waiting: Waiting, order_s: float) -> int:
    """Return how many requests of a router have an earlier order time.

    The result is a lower bound, since routers publish only some positions.
    """
    index = bisect_left(waiting.turns_s, order_s)
    return waiting.places[index - 1] if index else 0


def _work_s(waiting: Waiting, order_s: float) -> float:
    """Return the prefill time of a router's requests with an earlier order time."""
    index = bisect_left(waiting.turns_s, order_s)
    return waiting.work_s[index - 1] if index else 0.0


def _state(requests: Sequence[QueuedRequest[R]], now_s: float) -> QueueState:
    if not requests:
        return QueueState()
    oldest_s = now_s - min(request.arrived_s for request in requests)
    return QueueState(len(requests), sum(request.prefill_s for request in requests), oldest_s)
