"""Requests wait in the router while every replica has enough to do, in one order for the fleet.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.

    turn = begin + priority + min(20 x prefill, 150 s)

The least turn goes first. `begin` is the arrival; where there are tenants, it is later for those
that have more than their share (start-time fair queueing). So short prompts pass long ones, and no
prompt is passed for ever. A bound of the bonus keeps long prompts from waiting for all short ones.

Each router tells the others the turns of its first requests. It sends a request only if fewer
requests with an earlier turn wait elsewhere than replicas have room. Routers that disagree about
the replicas do not wait for each other longer than PATIENCE_S.
"""

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from kvroute.contract.messages import Waiting

HOLD_S = 2.0  # of prefill on every replica: further requests wait in the router
FILL_S = 0.25  # the same for batch requests, which fill what others leave
SECONDS_A_SECOND = 40.0  # by which a second of prefill delays a turn
MOST_DELAY_S = 150.0  # by which a long prompt delays its turn
BATCH_S = 300.0  # after so long, a batch request is one like others that came first
AGAIN_S = 0.9  # the others are told again, as one may be new
PATIENCE_S = 0.1  # for another router to send the request whose turn it is
WAKE_S = 0.02  # between two looks at the replicas while requests wait
TOLD = (*range(1, 17), *(2**k for k in range(5, 15)))  # which of the first requests others are told

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Held(Generic[R]):
    """A request that waits, or might have to."""

    request: R
    arrived_s: float
    prefill_s: float  # predicted, of what no replica has cached
    priority_s: float = 0.0  # by which its turn is later
    is_batch: bool = False  # it fills what others leave
    tenant: str = ""  # empty: it shares with nobody
    turn_s: float = 0.0  # set by the queue
    begin_s: float = 0.0  # the same
    cost_s: float = 0.0  # the same: what its tenant pays for it


@dataclass(frozen=True, slots=True)
class QueueState:
    """Of one class of requests, in this router."""

    requests: int = 0
    prefill_s: float = 0.0
    oldest_s: float = 0.0  # how long it has waited


def delay_s(prefill_s: float) -> float:
    """By how much the turn of a prompt is later than that of an empty one."""
    return min(SECONDS_A_SECOND * prefill_s, MOST_DELAY_S)


class _Line(Generic[R]):
    """Requests in the order of their turns."""

    def __init__(self) -> None:
        self.held: list[Held[R]] = []
        self._shares = FairShares()

    def add(self, held: Held[R], capacity: float) -> None:
        held.begin_s = self._shares.begin_s(held, capacity)
        held.turn_s = held.begin_s + held.priority_s + delay_s(held.prefill_s)
        insort(self.held, held, key=_turn)

    def send_first(self) -> Held[R]:
        held = self.held.pop(0)
        self._shares.sent(held)
        return held

    def remove(self, held: Held[R]) -> bool:
        """It is not sent. False: it is not here."""
        at = bisect_left(self.held, held.turn_s, key=_turn)
        while at < len(self.held) and self.held[at].turn_s == held.turn_s:
            if self.held[at] is held:
                del self.held[at]
                self._shares.gone(held)
                return True
            at += 1
        return False


class Queue(Generic[R]):
    """One router's waiting requests."""

    def __init__(self) -> None:
        self._line = _Line[R]()
        self._batch = _Line[R]()
        self.on_change: Callable[[], object] = lambda: None
        self._others: dict[str, Waiting] = {}  # by router; their turns on our clock
        self._has_changed = False  # since the others were told
        self._told_s = -math.inf
        self._since_s = math.inf  # when replicas had room first while another router's turn it was

    def __len__(self) -> int:
        return len(self._line.held) + len(self._batch.held)

    def __iter__(self) -> Iterator[Held[R]]:
        yield from self._line.held
        yield from self._batch.held

    def is_free(self, backlogs_s: Sequence[float], *, is_batch: bool = False) -> bool:
        """Whether a new request need not wait: some replica has room, and nobody is before it."""
        room_s = FILL_S if is_batch else HOLD_S
        if self._line.held or self._others or (is_batch and self._batch.held):
            return False
        return min(backlogs_s, default=0.0) < room_s

    def add(self, held: Held[R], *, replicas: int) -> None:
        """It waits from now on. replicas: that take requests."""
        line = self._batch if held.is_batch else self._line
        line.add(held, max(1, replicas) / (1 + len(self._others)))
        self._changed()

    def remove(self, held: Held[R]) -> bool:
        """It no longer waits, and was not sent; False: it did not wait."""
        self._changed()
        return self._line.remove(held) or self._batch.remove(held)

    def due(self, backlogs_s: Sequence[float], now_s: float) -> Held[R] | None:
        """The request that goes to a replica now; it no longer waits. None: none does yet.

        backlogs_s: seconds of prefill pending on each replica that takes requests.
        """
        line = self._line if self._line.held else self._batch
        if not line.held or not self._is_turn(line, backlogs_s, now_s):
            return None
        self._since_s = math.inf
        self._changed()
        return line.send_first()

    def _is_turn(self, line: _Line[R], backlogs_s: Sequence[float], now_s: float) -> bool:
        """Whether the first request of the line goes now."""
        if line is self._batch:
            return not self._others and min(backlogs_s, default=0.0) < FILL_S
        room = sum(backlog_s < HOLD_S for backlog_s in backlogs_s)
        if not room:
            self._since_s = math.inf
            return False
        if self._before(line.held[0].turn_s) < room:
            return True
        self._since_s = min(self._since_s, now_s)
        return now_s - self._since_s > PATIENCE_S

    def _changed(self) -> None:
        self._has_changed = True
        self.on_change()

    def _before(self, turn_s: float) -> int:
        """Requests of other routers with an earlier turn."""
        return sum(_position(waiting, turn_s) for waiting in self._others.values())

    # Forecast.

    def forecast_s(self, held: Held[R], *, replicas: int, arriving: float, now_s: float) -> float:
        """How long a request will wait that has just come, or waits already.

        arriving: seconds of prefill that come each second, to all routers.
        """
        turn_s = held.turn_s or held.arrived_s + held.priority_s + delay_s(held.prefill_s)
        ahead_s = sum(other.prefill_s for other in self._line.held if other.turn_s < turn_s)
        ahead_s += sum(_work_s(waiting, turn_s) for waiting in self._others.values())
        if held.is_batch:
            ahead_s += sum(other.prefill_s for other in self._batch.held if other.turn_s < turn_s)
        return waiting_s(ahead_s, turn_s - now_s, arriving, replicas)

    def state(self, now_s: float) -> dict[str, QueueState]:
        """By class: default and batch. Another thread may ask."""
        lines = {"default": [*self._line.held], "batch": [*self._batch.held]}
        return {name: _state(held, now_s) for name, held in lines.items()}

    # The other routers.

    def elsewhere(self) -> QueueState:
        """What waits in the other routers, as they told: no batch requests, and not since when."""
        others = self._others.values()
        return QueueState(
            sum(waiting.places[-1] for waiting in others),
            sum(waiting.work_s[-1] for waiting in others),
        )

    def report(self, now_s: float) -> Waiting | None:
        """What the other routers should know; None: nothing new. Clocks differ, so turns count from
        now."""
        held = self._line.held
        is_due = held and now_s - self._told_s >= AGAIN_S
        if not (self._has_changed or is_due):
            return None
        self._has_changed, self._told_s = False, now_s
        work_s = [*accumulate(each.prefill_s for each in held)]
        places = [*(n for n in TOLD if n < len(held)), len(held)] if held else []
        return Waiting(
            places, [held[n - 1].turn_s - now_s for n in places], [work_s[n - 1] for n in places]
        )

    def hear(self, router: str, waiting: Waiting, now_s: float) -> None:
        """What another router told just now."""
        if not waiting.places:
            self.forget(router)
            return
        turns_s = [now_s + turn_s for turn_s in waiting.turns_s]
        self._others[router] = Waiting(waiting.places, turns_s, waiting.work_s)

    def forget(self, router: str) -> None:
        """It is gone, or has nothing that waits."""
        self._others.pop(router, None)


class FairShares:
    """Start-time fair queueing over tenants, in seconds of prefill, so that what is cached costs
    nothing. A request begins when the last one of its tenant would have ended with a share of the
    fleet, and not before the latest begin of those that were sent."""

    def __init__(self) -> None:
        self._ends_s: dict[str, float] = {}  # by tenant
        self._waiting = Counter[str]()  # by tenant; others have no entry
        self._now_s = -math.inf  # the latest begin of those that were sent

    def begin_s(self, held: Held[R], capacity: float) -> float:
        """capacity: replicas. A tenant that shares with nobody is served as its requests come."""
        tenant = held.tenant
        is_alone = not self._waiting.keys() - {tenant}
        ends_s = self._ends_s.get(tenant, -math.inf)
        begin_s = held.arrived_s if is_alone else max(self._now_s, ends_s)
        if begin_s == -math.inf:
            begin_s = held.arrived_s
        self._waiting[tenant] += 1
        held.cost_s = held.prefill_s * len(self._waiting) / capacity
        self._ends_s[tenant] = max(begin_s, ends_s) + held.cost_s
        return begin_s

    def sent(self, held: Held[R]) -> None:
        self._now_s = max(self._now_s, held.begin_s)
        self._leave(held.tenant)

    def gone(self, held: Held[R]) -> None:
        """It was not sent, so it cost nothing."""
        self._ends_s[held.tenant] -= held.cost_s
        self._leave(held.tenant)

    def _leave(self, tenant: str) -> None:
        self._waiting[tenant] -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        if not self._waiting:  # nobody competes any more
            self._ends_s.clear()
            self._now_s = -math.inf


def waiting_s(ahead_s: float, lead_s: float, arriving: float, replicas: int) -> float:
    """The time until so many seconds of prefill are done. What comes within `lead_s` has an
    earlier turn, so its work is done before, too."""
    if replicas <= 0:
        return math.inf
    lead_s = max(0.0, lead_s)
    if arriving < replicas:
        soon_s = ahead_s / (replicas - arriving)
        if soon_s <= lead_s:
            return soon_s
    return (ahead_s + arriving * lead_s) / replicas


def _turn(held: Held[R]) -> float:
    return held.turn_s


def _position(waiting: Waiting, turn_s: float) -> int:
    """How many of its requests have an earlier turn, at least."""
    at = bisect_left(waiting.turns_s, turn_s)
    return waiting.places[at - 1] if at else 0


def _work_s(waiting: Waiting, turn_s: float) -> float:
    at = bisect_left(waiting.turns_s, turn_s)
    return waiting.work_s[at - 1] if at else 0.0


def _state(held: Sequence[Held[R]], now_s: float) -> QueueState:
    if not held:
        return QueueState()
    oldest_s = now_s - min(each.arrived_s for each in held)
    return QueueState(len(held), sum(each.prefill_s for each in held), oldest_s)
