"""The order in which requests leave the router, while every replica has enough to do.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.

    turn = arrival + priority + DELAY x prefill

The request with the earliest turn goes first. So short prompts pass long ones, but a prompt never
waits for prompts that arrive more than DELAY of its own prefill times later.

Background requests are those of batch jobs, and those of a tenant that used more than its share of
the fleet's time lately. They go to replicas that are nearly idle and have memory to spare, while no
other request waits. After BATCH_S a background request joins the default line.

Each router publishes the turns of its first requests. It sends a request only if fewer requests
with an earlier turn wait in other routers than replicas can take one. Routers may disagree about
the replicas. So a replica that could take a request for PATIENCE_S, and got none from other
routers, takes requests of any turn until it is full.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from kvroute.contract.messages import Waiting
from kvroute.router.placement.loads import ReplicaCapacity
from kvroute.router.queueing.forecast import waiting_s
from kvroute.router.queueing.shares import Shares

HOLD = 0.45  # requests wait while every replica has more prefill pending, in Scale.busy_s
FILL = 0.11  # background requests go to replicas with less prefill pending, in Scale.busy_s
SPARE_SHARE = 0.5  # background requests go to replicas with a larger free share of KV cache
DELAY = 40.0  # one second of prefill delays a turn by this many seconds
INTERACTIVE = 14.0  # interactive requests have an earlier turn by this, in Scale.busy_s
BATCH_S = 300.0  # a background request joins the default line after this long
LOOKED_AT = 64  # background requests searched for a prompt that an idle replica has cached
DIVIDE_S = 1.0  # time between two checks which tenants are above their share
AGAIN_S = 0.9  # turns are published again after this long, for routers that started since
PATIENCE_S = 0.4  # time that another router has to send the request whose turn it is
STALE_S = 1.0  # seconds after which a router's last look at the replicas is outdated
WAKE = 0.01  # time between two looks at the replicas while requests wait, in Scale.busy_s
MIN_WAKE_S, MAX_WAKE_S = 0.005, 0.1  # bounds of that time, so that the event loop stays idle
PUBLISHED = (*range(1, 17), *(2**k for k in range(5, 15)))  # places whose turns are published

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[R]):
    """A request that waits or may have to."""

    request: R
    arrived_s: float
    prefill_s: float  # predicted prefill time on the best replica
    priority_s: float = 0.0  # delay of its turn that the client asked for
    is_interactive: bool = False
    is_batch: bool = False  # whether it is a background request
    tenant: str = ""  # tenant whose share it uses; empty: no share
    home: str = ""  # the replica that has most of its prompt cached; empty: no replica has much
    turn_s: float = 0.0  # set by the queue
    was_background: bool = False  # set by the queue: it has waited as a background request
    is_promoted: bool = False  # set by the queue: it was promoted to the default line
    among: Sequence[str] = ()  # set by the queue: the replicas that may get it; empty: all


@dataclass(frozen=True, slots=True)
class QueueState:
    """Length and age of one of this router's lines."""

    requests: int = 0
    prefill_s: float = 0.0
    oldest_s: float = 0.0  # how long the oldest request has waited


class _Line(Generic[R]):
    """Requests in the order of their turns."""

    def __init__(self) -> None:
        self.held: list[QueuedRequest[R]] = []

    def add(self, held: QueuedRequest[R]) -> None:
        insort(self.held, held, key=_turn)

    def remove(self, held: QueuedRequest[R]) -> bool:
        """Remove a request. Returns False if it is not in this line."""
        at = bisect_left(self.held, held.turn_s, key=_turn)
        while at < len(self.held) and self.held[at].turn_s == held.turn_s:
            if self.held[at] is held:
                del self.held[at]
                return True
            at += 1
        return False


class Queue(Generic[R]):
    """One router's waiting requests.

    Args:
        busy_s: returns Scale.busy_s, the fleet's unit of time.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self.on_change: Callable[[], object] = lambda: None
        self._line = _Line[R]()
        self._above = _Line[R]()  # background requests of tenants above their share
        self._batch = _Line[R]()
        self._shares = Shares()
        self._others: dict[
            str, Waiting
        ] = {}  # router -> its waiting requests, with turns on this router's clock
        self._has_changed = False  # since the turns were published
        self._published_s = -math.inf
        self._divided_s = -math.inf  # when shares were last checked
        self._looked_s = -math.inf  # when it was last checked whose turn it is
        # Replicas that can take a request -> since when other routers have sent them nothing.
        self._open_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._line.held) + self.background

    def __iter__(self) -> Iterator[QueuedRequest[R]]:
        yield from self._line.held
        yield from self._above.held
        yield from self._batch.held

    @property
    def batch(self) -> int:
        """Return the number of waiting batch requests that were not promoted."""
        return len(self._batch.held)

    @property
    def background(self) -> int:
        """Return the number of waiting background requests."""
        return len(self._above.held) + self.batch

    @property
    def hold_s(self) -> float:
        """Return the prefill on every replica above which further requests wait."""
        return HOLD * self._busy_s()

    @property
    def wake_s(self) -> float:
        """Return the time between two looks at the replicas while requests wait."""
        return min(MAX_WAKE_S, max(MIN_WAKE_S, WAKE * self._busy_s()))

    def turn_s(self, held: QueuedRequest[R]) -> float:
        """Return when the request's turn is, if it comes in the order of turns."""
        turn_s = held.arrived_s + held.priority_s + DELAY * held.prefill_s
        return turn_s - INTERACTIVE * self._busy_s() if held.is_interactive else turn_s

    def is_free(self, held: QueuedRequest[R], backlog_s: float) -> bool:
        """Return whether a new request can go to a replica at once.

        Args:
            backlog_s: the least backlog of any replica.
        """
        is_ahead = not (self._line.held or self._others)
        return is_ahead and backlog_s < self.hold_s and self._line_of(held) is self._line

    def add(self, held: QueuedRequest[R]) -> None:
        """Let a request wait from now on."""
        held.turn_s = self.turn_s(held)
        self._put(held)
        self._changed()

    def remove(self, held: QueuedRequest[R]) -> bool:
        """Remove a request. Returns False if it did not wait."""
        self._changed()
        return any(line.remove(held) for line in (self._line, self._above, self._batch))

    def sent(self, held: QueuedRequest[R], now_s: float) -> None:
        """Record that a request goes to a replica, whether it has waited or not."""
        self._shares.use(held.tenant, held.prefill_s, now_s)

    def due(self, replicas: Sequence[ReplicaCapacity], now_s: float) -> QueuedRequest[R] | None:
        """Remove and return the request that goes to a replica now; None: none goes yet.

        Args:
            replicas: the replicas that take requests.
        """
        self._shares.see([held.tenant for held in self._line.held[:LOOKED_AT]], now_s)
        self._divide(now_s)
        self._promote(now_s)
        if self._line.held:
            held = self._line.held[0] if self._is_turn(replicas, now_s) else None
        else:
            held = self._next_background(replicas)
        if held is not None:
            self.remove(held)
        return held

    def _put(self, held: QueuedRequest[R]) -> None:
        line = self._line_of(held)
        held.was_background |= line is not self._line
        line.add(held)

    def _line_of(self, held: QueuedRequest[R]) -> _Line[R]:
        if held.is_promoted:
            return self._line
        if held.is_batch:
            return self._batch
        return self._above if self._shares.are_exceeded(held.tenant) else self._line

    def _divide(self, now_s: float) -> None:
        """Sort requests into lines again, as shares change."""
        if now_s - self._divided_s < DIVIDE_S:
            return
        self._divided_s = now_s
        waiting = [*self._line.held, *self._above.held]
        self._line.held.clear()
        self._above.held.clear()
        for held in waiting:
            self._put(held)
        self._changed()

    def _promote(self, now_s: float) -> None:
        """Move background requests that have waited for BATCH_S to the default line."""
        for line in (self._above, self._batch):
            while line.held and line.held[0].turn_s + BATCH_S < now_s:
                held = line.held.pop(0)
                held.is_promoted = True
                held.turn_s += BATCH_S
                self._put(held)

    def _is_turn(self, replicas: Sequence[ReplicaCapacity], now_s: float) -> bool:
        """Return whether the first request goes now."""
        open_ids = [replica.replica_id for replica in replicas if replica.backlog_s < self.hold_s]
        is_first = self._before(self._line.held[0].turn_s) < len(open_ids)
        if is_first or now_s - self._looked_s > STALE_S:
            self._open_s.clear()
        self._looked_s = now_s
        if is_first:
            return True
        self._open_s = {open_id: self._open_s.get(open_id, now_s) for open_id in open_ids}
        return now_s - min(self._open_s.values(), default=now_s) > PATIENCE_S

    def _next_background(self, replicas: Sequence[ReplicaCapacity]) -> QueuedRequest[R] | None:
        """Return a background request whose prompt an idle replica has cached, or no replica.

        It is one of the first LOOKED_AT; if there is none, it is the very first. Its `among`
        lists the idle replicas.
        """
        line = self._above if self._above.held else self._batch
        if not line.held or self._others:
            return None
        idle = [
            replica.replica_id
            for replica in replicas
            if replica.backlog_s < FILL * self._busy_s() and replica.free_share > SPARE_SHARE
        ]
        if not idle:
            return None
        first = line.held[:LOOKED_AT]
        held = next((each for each in first if not each.home or each.home in idle), first[0])
        held.among = idle
        return held

    def _changed(self) -> None:
        self._has_changed = True
        self.on_change()

    def _before(self, turn_s: float) -> int:
        """Return the number of requests of other routers with an earlier turn."""
        return sum(_position(waiting, turn_s) for waiting in self._others.values())

    # Forecast.

    def forecast_s(
        self, held: QueuedRequest[R], *, replicas: int, sooner: Sequence[float], now_s: float
    ) -> float:
        """Return how long a new request will wait.

        Args:
            sooner: the work that arrives at all routers; see Arrivals.sooner.
        """
        at_s = self.turn_s(held)
        ahead_s = sum(_work_s(waiting, at_s) for waiting in self._others.values())
        ahead_s += _sooner_s(self._line.held, at_s)
        if (line := self._line_of(held)) is not self._line:
            ahead_s += _sooner_s(line.held, at_s)
        return waiting_s(ahead_s, at_s - now_s, sooner, replicas, self._busy_s())

    def state(self, now_s: float) -> dict[str, QueueState]:
        """Return the state of the default and the background lines. Other threads may call this."""
        lines = {"default": [*self._line.held], "filling": [*self._above.held, *self._batch.held]}
        return {name: _state(held, now_s) for name, held in lines.items()}

    # The other routers.

    def elsewhere(self) -> QueueState:
        """Return what waits in the other routers. The age of requests there is unknown."""
        others = self._others.values()
        return QueueState(
            sum(waiting.places[-1] for waiting in others),
            sum(waiting.work_s[-1] for waiting in others),
        )

    def report(self, now_s: float) -> Waiting | None:
        """Return what to publish to other routers; None: nothing is new.

        Turns are relative to now, since the routers' clocks differ.
        """
        held = self._line.held
        if not self._has_changed and now_s - self._published_s < AGAIN_S:
            return None
        self._has_changed, self._published_s = False, now_s
        work_s = [*accumulate(each.prefill_s for each in held)]
        places = [*(n for n in PUBLISHED if n < len(held)), len(held)] if held else []
        return Waiting(
            places, [held[n - 1].turn_s - now_s for n in places], [work_s[n - 1] for n in places]
        )

    def receive(self, router: str, waiting: Waiting, now_s: float) -> None:
        """Take over what another router has just published."""
        if not waiting.places:
            self.forget(router)
            return
        turns_s = [now_s + turn_s for turn_s in waiting.turns_s]
        self._others[router] = Waiting(waiting.places, turns_s, waiting.work_s)

    def taken(self, replica_id: str) -> None:
        """Record that another router has just sent the replica a request."""
        self._open_s.pop(replica_id, None)

    def forget(self, router: str) -> None:
        """Forget a router that is gone or has no waiting requests."""
        self._others.pop(router, None)


def _sooner_s(line: Sequence[QueuedRequest[R]], turn_s: float) -> float:
    """Return the prefill time of the requests with an earlier turn."""
    return sum(held.prefill_s for held in line[: bisect_left(line, turn_s, key=_turn)])


def _turn(held: QueuedRequest[R]) -> float:
    return held.turn_s


def _position(waiting: Waiting, turn_s: float) -> int:
    """Return how many requests of a router have an earlier turn, at least."""
    at = bisect_left(waiting.turns_s, turn_s)
    return waiting.places[at - 1] if at else 0


def _work_s(waiting: Waiting, turn_s: float) -> float:
    at = bisect_left(waiting.turns_s, turn_s)
    return waiting.work_s[at - 1] if at else 0.0


def _state(held: Sequence[QueuedRequest[R]], now_s: float) -> QueueState:
    if not held:
        return QueueState()
    oldest_s = now_s - min(each.arrived_s for each in held)
    return QueueState(len(held), sum(each.prefill_s for each in held), oldest_s)
