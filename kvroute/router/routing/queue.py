"""Requests wait in the router while every replica has enough to do, in one order for the fleet.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.

    turn = arrival + priority + min(40 x prefill, 150 s)

The least turn goes first. So short prompts pass long ones, and none is passed for ever. The bound
keeps the longest prompts from waiting for all others.

Some requests only *fill* what others leave: those of batch jobs, and those of a tenant that had
more than its share of the fleet's time lately. They go to replicas that are nearly idle and have
memory to spare, while nothing else waits. After BATCH_S they are like all others.

Each router tells the others the turns of its first requests. It sends one only if fewer requests
with an earlier turn wait elsewhere than replicas have room. Routers that disagree about the
replicas do not wait for each other longer than PATIENCE_S.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from kvroute.contract.messages import Waiting
from kvroute.router.routing.forecast import waiting_s

HOLD_S = 2.0  # of prefill on every replica, at most: further requests wait in the router
HOLD_PROMPTS = 4.0  # the same, in mean prompts: more would only wait in the engines
LEAST_HOLD_S = 0.25  # at least, so that engines never wait for a router
MEAN_SHARE = 0.02  # weight of the latest prompt in their mean
FILL_S = 0.25  # of prefill on a replica: nothing more of what fills goes there
SPARE_SHARE = 0.5  # of its KV cache, that it leaves to others
SECONDS_A_SECOND = 40.0  # by which a second of prefill delays a turn
MOST_DELAY_S = 150.0  # by which a long prompt delays its turn
BATCH_S = 300.0  # after so long, what fills is like what came first
LOOKED_AT = 64  # of the first that fill, for one whose prompt is cached where there is room
SCARCE_S = 5.0  # for which shares matter after somebody has waited
SHARE_S = 30.0  # time constant of what tenants had lately
LEEWAY = 1.5  # equal shares that a tenant can have before it only fills
MOST_TENANTS = 4096  # that are counted; further ones have their share
FORGOTTEN_S = 1e-3  # of prefill: so little of a tenant's is forgotten
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
    home: str = ""  # the replica that has most of its prompt cached; empty: none has much
    turn_s: float = 0.0  # set by the queue
    has_aged: bool = False  # the same: it fills no longer
    among: Sequence[str] = ()  # the same: the replicas that it may go to; empty: all


class Room(NamedTuple):
    """What a replica can take."""

    replica_id: str
    backlog_s: float  # seconds of prefill pending
    free_share: float = 1.0  # of its KV cache, without what its requests need


@dataclass(frozen=True, slots=True)
class QueueState:
    """Of one line of requests, in this router."""

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

    def add(self, held: Held[R]) -> None:
        insort(self.held, held, key=_turn)

    def remove(self, held: Held[R]) -> bool:
        """False: it is not here."""
        at = bisect_left(self.held, held.turn_s, key=_turn)
        while at < len(self.held) and self.held[at].turn_s == held.turn_s:
            if self.held[at] is held:
                del self.held[at]
                return True
            at += 1
        return False


class Queue(Generic[R]):
    """One router's waiting requests."""

    def __init__(self) -> None:
        self.on_change: Callable[[], object] = lambda: None
        self._line = _Line[R]()
        self._filling = _Line[R]()
        self._shares = Shares()
        self._waited_s = -math.inf  # when a request waited that is no batch request
        self._urgent = 0  # waiting requests that are no batch requests
        self._mean_s = HOLD_S / HOLD_PROMPTS  # of the prefill of recent requests
        self._others: dict[str, Waiting] = {}  # by router; their turns on our clock
        self._has_changed = False  # since the others were told
        self._told_s = -math.inf
        self._since_s = math.inf  # when replicas had room first while another router's turn it was

    def __len__(self) -> int:
        return len(self._line.held) + len(self._filling.held)

    def __iter__(self) -> Iterator[Held[R]]:
        yield from self._line.held
        yield from self._filling.held

    @property
    def hold_s(self) -> float:
        """Prefill pending on a replica with which it has enough to do."""
        return min(HOLD_S, max(LEAST_HOLD_S, HOLD_PROMPTS * self._mean_s))

    def is_free(self, held: Held[R], backlog_s: float) -> bool:
        """Whether a new request need not wait: a replica has room, and nobody is before it.

        backlog_s: the least of any replica.
        """
        return not (
            self._line.held
            or self._others
            or backlog_s >= self.hold_s
            or self._fills(held, held.arrived_s)
        )

    def add(self, held: Held[R]) -> None:
        """It waits from now on."""
        held.turn_s = turn_s(held)
        (self._filling if self._fills(held, held.arrived_s) else self._line).add(held)
        self._urgent += not held.is_batch
        self._changed()

    def remove(self, held: Held[R]) -> bool:
        """It no longer waits; False: it did not."""
        if not (self._line.remove(held) or self._filling.remove(held)):
            return False
        self._urgent -= not held.is_batch
        self._changed()
        return True

    def sent(self, held: Held[R], now_s: float) -> None:
        """It goes to a replica, whether it has waited or not."""
        self._shares.use(held.tenant, held.prefill_s, now_s)
        self._mean_s += MEAN_SHARE * (held.prefill_s - self._mean_s)

    def due(self, rooms: Sequence[Room], now_s: float) -> Held[R] | None:
        """The request that goes to a replica now; it no longer waits. None: none does yet.

        rooms: of the replicas that take requests.
        """
        if self._urgent:
            self._waited_s = now_s
        self._reconsider(now_s)
        if self._line.held:
            held = self._line.held[0] if self._is_turn(rooms, now_s) else None
        else:
            held = self._filler(rooms)
        if held is not None:
            self.remove(held)
            self._since_s = math.inf
        return held

    def _reconsider(self, now_s: float) -> None:
        """The first ones wait in the other line, if what their tenants had has changed since."""
        while self._line.held and self._fills(self._line.held[0], now_s):
            self._filling.add(self._line.held.pop(0))
        while self._filling.held:
            held = self._filling.held[0]
            held.has_aged = now_s > held.turn_s + BATCH_S
            if self._fills(held, now_s):
                break
            self._line.add(self._filling.held.pop(0))

    def _fills(self, held: Held[R], now_s: float) -> bool:
        """Whether it takes only what others leave. Shares matter while somebody has to wait."""
        if held.has_aged:
            return False
        is_scarce = now_s - self._waited_s < SCARCE_S
        return held.is_batch or (is_scarce and self._shares.are_exceeded(held.tenant))

    def _is_turn(self, rooms: Sequence[Room], now_s: float) -> bool:
        """Whether the first request goes now."""
        hold_s = self.hold_s
        room = sum(each.backlog_s < hold_s for each in rooms)
        if not room:
            self._since_s = math.inf
            return False
        if self._before(self._line.held[0].turn_s) < room:
            return True
        self._since_s = min(self._since_s, now_s)
        return now_s - self._since_s > PATIENCE_S

    def _filler(self, rooms: Sequence[Room]) -> Held[R] | None:
        """The first request that fills, and whose prompt is cached on an idle replica or on none;
        without such a one, the first. The idle replicas are noted in it."""
        if not self._filling.held or self._others:
            return None
        idle = [
            each.replica_id
            for each in rooms
            if each.backlog_s < FILL_S and each.free_share > SPARE_SHARE
        ]
        if not idle:
            return None
        first = self._filling.held[:LOOKED_AT]
        held = next((each for each in first if not each.home or each.home in idle), first[0])
        held.among = idle
        return held

    def _changed(self) -> None:
        self._has_changed = True
        self.on_change()

    def _before(self, turn_s: float) -> int:
        """Requests of other routers with an earlier turn."""
        return sum(_position(waiting, turn_s) for waiting in self._others.values())

    # Forecast.

    def forecast_s(
        self, held: Held[R], *, replicas: int, sooner: Sequence[float], now_s: float
    ) -> float:
        """How long a request will wait that has just come.

        sooner: what comes to all routers, as Arrivals tells it.
        """
        at_s = turn_s(held)
        ahead_s = sum(_work_s(waiting, at_s) for waiting in self._others.values())
        ahead_s += _sooner_s(self._line.held, at_s)
        if self._fills(held, now_s):
            ahead_s += _sooner_s(self._filling.held, at_s)
        return waiting_s(ahead_s, at_s - now_s, sooner, replicas)

    def state(self, now_s: float) -> dict[str, QueueState]:
        """By line: default, and filling. Another thread may ask."""
        lines = {"default": [*self._line.held], "filling": [*self._filling.held]}
        return {name: _state(held, now_s) for name, held in lines.items()}

    # The other routers.

    def elsewhere(self) -> QueueState:
        """What waits for its turn in the other routers, as they told; not since when."""
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


class Shares:
    """How much of the fleet's time each tenant had lately, in seconds of prefill: what is cached
    costs nothing."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}  # by tenant, as of _at_s
        self._total_s = 0.0
        self._at_s = 0.0

    def use(self, tenant: str, prefill_s: float, now_s: float) -> None:
        self._decay(now_s)
        if tenant and (tenant in self._used_s or len(self._used_s) < MOST_TENANTS):
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + prefill_s
            self._total_s += prefill_s

    def are_exceeded(self, tenant: str) -> bool:
        """Whether the tenant had clearly more than its equal share. One alone has no share."""
        count = len(self._used_s)
        return count > 1 and self._used_s.get(tenant, 0.0) > LEEWAY * self._total_s / count

    def _decay(self, now_s: float) -> None:
        """Once a second is enough."""
        if now_s - self._at_s < 1.0:
            return
        keep = math.exp((self._at_s - now_s) / SHARE_S)
        used_s = {tenant: keep * used_s for tenant, used_s in self._used_s.items()}
        self._used_s = {tenant: used for tenant, used in used_s.items() if used > FORGOTTEN_S}
        self._total_s = sum(self._used_s.values())
        self._at_s = now_s


def turn_s(held: Held[R]) -> float:
    """When its turn is, if it comes in the order of turns."""
    return held.arrived_s + held.priority_s + delay_s(held.prefill_s)


def _sooner_s(line: Sequence[Held[R]], turn_s: float) -> float:
    """Prefill of those with an earlier turn."""
    return sum(held.prefill_s for held in line[: bisect_left(line, turn_s, key=_turn)])


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
