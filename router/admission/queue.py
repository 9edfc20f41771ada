"""Requests wait in the router while every replica has enough to do, in one order for the fleet.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.

    turn = arrival + priority + DELAY x prefill

The least turn goes first. So short prompts pass long ones, and none is passed for ever: a prompt
never waits for those that come more than DELAY of its own prefill times later.

Some requests only use what others leave: those of batch jobs, and those of a tenant that had more
than its share of the fleet's time lately. They go to replicas that are nearly idle and have memory
to spare, while nothing else waits. After BATCH_S they are like all others.

Each router tells the others the turns of its first requests. It sends one only if fewer requests
with an earlier turn wait elsewhere than replicas have room. Routers may disagree about the
replicas. So a replica that has had room for PATIENCE_S, and got nothing from the others, takes
requests of any turn until it is full.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from kvroute.contract.messages import Waiting
from kvroute.router.admission.forecast import waiting_s

HOLD = 0.45  # requests wait in the router while every replica has more prefill, in Scale.busy_s
FILL = 0.11  # requests that use what others leave go to replicas with less prefill, in Scale.busy_s
SPARE_SHARE = 0.5  # of its KV cache, that it leaves to others
DELAY = 40.0  # seconds by which one second of prefill delays a turn
INTERACTIVE = 14.0  # by which the turns of interactive requests are earlier, in Scale.busy_s
BATCH_S = 300.0  # after so long, what fills is like what comes then
LOOKED_AT = 64  # of the first that fill, for one whose prompt is cached where there is room
SCARCE_S = 30.0  # for which shares matter after others have waited
MOST_SHARERS = 16  # among which the time is shared: nobody is above its share with less than 9%
DIVIDE_S = 1.0  # between two looks at who is above its share
SHARE_S = 30.0  # time constant of what tenants had lately
LEEWAY = 1.5  # equal shares that a tenant can have before it only fills
MOST_TENANTS = 4096  # that are counted; further ones have their share
FORGOTTEN_S = 1e-3  # of prefill: so little of a tenant's is forgotten
AGAIN_S = 0.9  # the others are told again, as one may be new
PATIENCE_S = 0.4  # for another router to send the request whose turn it is
BLINK_S = 1.0  # a router that has not looked for so long knows nothing of the time between
WAKE = 0.01  # between two looks at the replicas while requests wait, in Scale.busy_s ...
LEAST_WAKE_S, MOST_WAKE_S = 0.005, 0.1  # ... within these bounds, so that the event loop is idle
TOLD = (*range(1, 17), *(2**k for k in range(5, 15)))  # which of the first requests others are told

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Held(Generic[R]):
    """A request that waits, or might have to."""

    request: R
    arrived_s: float
    prefill_s: float  # predicted, of what no replica has cached
    priority_s: float = 0.0  # by which its turn is later, as its client says
    is_interactive: bool = False
    is_batch: bool = False  # it fills what others leave
    tenant: str = ""  # empty: it shares with nobody
    home: str = ""  # the replica that has most of its prompt cached; empty: none has much
    turn_s: float = 0.0  # set by the queue
    has_filled: bool = False  # the same: it has waited for what others left
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
    """One router's waiting requests.

    Args:
        busy_s: returns the fleet's unit of time, of its Scale.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self.on_change: Callable[[], object] = lambda: None
        self._line = _Line[R]()
        self._above = _Line[R]()  # of tenants above their share
        self._batch = _Line[R]()
        self._shares = Shares()
        self._others: dict[str, Waiting] = {}  # by router; their turns on our clock
        self._has_changed = False  # since the others were told
        self._told_s = -math.inf
        self._divided_s = -math.inf  # when it was last looked at who is above its share
        self._looked_s = -math.inf  # when it was last looked whose turn it is
        self._open_s: dict[str, float] = {}  # by replica with room: since when others sent nothing

    def __len__(self) -> int:
        return len(self._line.held) + self.filling

    def __iter__(self) -> Iterator[Held[R]]:
        yield from self._line.held
        yield from self._above.held
        yield from self._batch.held

    @property
    def batch(self) -> int:
        """Batch requests that wait, and are not like others yet."""
        return len(self._batch.held)

    @property
    def filling(self) -> int:
        """Requests that wait for what others leave."""
        return len(self._above.held) + self.batch

    @property
    def hold_s(self) -> float:
        """Return the prefill on every replica above which further requests wait."""
        return HOLD * self._busy_s()

    @property
    def wake_s(self) -> float:
        """Return the time between two looks at the replicas while requests wait."""
        return min(MOST_WAKE_S, max(LEAST_WAKE_S, WAKE * self._busy_s()))

    def turn_s(self, held: Held[R]) -> float:
        """Return when the request's turn is, if it comes in the order of turns."""
        turn_s = held.arrived_s + held.priority_s + DELAY * held.prefill_s
        return turn_s - INTERACTIVE * self._busy_s() if held.is_interactive else turn_s

    def is_free(self, held: Held[R], backlog_s: float) -> bool:
        """Whether a new request need not wait: a replica has room, and nobody is before it.

        backlog_s: the least of any replica.
        """
        is_ahead = not (self._line.held or self._others)
        return is_ahead and backlog_s < self.hold_s and self._line_of(held) is self._line

    def add(self, held: Held[R]) -> None:
        """It waits from now on."""
        held.turn_s = self.turn_s(held)
        self._put(held)
        self._changed()

    def remove(self, held: Held[R]) -> bool:
        """It no longer waits; False: it did not."""
        self._changed()
        return any(line.remove(held) for line in (self._line, self._above, self._batch))

    def sent(self, held: Held[R], now_s: float) -> None:
        """It goes to a replica, whether it has waited or not."""
        self._shares.use(held.tenant, held.prefill_s, now_s)

    def due(self, rooms: Sequence[Room], now_s: float) -> Held[R] | None:
        """The request that goes to a replica now; it no longer waits. None: none does yet.

        rooms: of the replicas that take requests.
        """
        self._shares.see([held.tenant for held in self._line.held[:LOOKED_AT]], now_s)
        self._divide(now_s)
        self._promote(now_s)
        if self._line.held:
            held = self._line.held[0] if self._is_turn(rooms, now_s) else None
        else:
            held = self._filler(rooms)
        if held is not None:
            self.remove(held)
        return held

    def _put(self, held: Held[R]) -> None:
        line = self._line_of(held)
        held.has_filled |= line is not self._line
        line.add(held)

    def _line_of(self, held: Held[R]) -> _Line[R]:
        if held.has_aged:
            return self._line
        if held.is_batch:
            return self._batch
        return self._above if self._shares.are_exceeded(held.tenant) else self._line

    def _divide(self, now_s: float) -> None:
        """What tenants had lately may have changed."""
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
        """What has filled for so long is from now on like what comes now."""
        for line in (self._above, self._batch):
            while line.held and line.held[0].turn_s + BATCH_S < now_s:
                held = line.held.pop(0)
                held.has_aged = True
                held.turn_s += BATCH_S
                self._put(held)

    def _is_turn(self, rooms: Sequence[Room], now_s: float) -> bool:
        """Whether the first request goes now."""
        replicas = [each.replica_id for each in rooms if each.backlog_s < self.hold_s]
        is_first = self._before(self._line.held[0].turn_s) < len(replicas)
        if is_first or now_s - self._looked_s > BLINK_S:
            self._open_s.clear()
        self._looked_s = now_s
        if is_first:
            return True
        self._open_s = {each: self._open_s.get(each, now_s) for each in replicas}
        return now_s - min(self._open_s.values(), default=now_s) > PATIENCE_S

    def _filler(self, rooms: Sequence[Room]) -> Held[R] | None:
        """The first request that fills, and whose prompt is cached on an idle replica or on none;
        without such a one, the first. The idle replicas are noted in it."""
        line = self._above if self._above.held else self._batch
        if not line.held or self._others:
            return None
        idle = [
            each.replica_id
            for each in rooms
            if each.backlog_s < FILL * self._busy_s() and each.free_share > SPARE_SHARE
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
        """Requests of other routers with an earlier turn."""
        return sum(_position(waiting, turn_s) for waiting in self._others.values())

    # Forecast.

    def forecast_s(
        self, held: Held[R], *, replicas: int, sooner: Sequence[float], now_s: float
    ) -> float:
        """How long a request will wait that has just come.

        sooner: what comes to all routers, as Arrivals tells it.
        """
        at_s = self.turn_s(held)
        ahead_s = sum(_work_s(waiting, at_s) for waiting in self._others.values())
        ahead_s += _sooner_s(self._line.held, at_s)
        if (line := self._line_of(held)) is not self._line:
            ahead_s += _sooner_s(line.held, at_s)
        return waiting_s(ahead_s, at_s - now_s, sooner, replicas, self._busy_s())

    def state(self, now_s: float) -> dict[str, QueueState]:
        """By line: default, and filling. Another thread may ask."""
        lines = {"default": [*self._line.held], "filling": [*self._above.held, *self._batch.held]}
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
        if not self._has_changed and now_s - self._told_s < AGAIN_S:
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

    def taken(self, replica_id: str) -> None:
        """Another router sent it a request just now."""
        self._open_s.pop(replica_id, None)

    def forget(self, router: str) -> None:
        """It is gone, or has nothing that waits."""
        self._others.pop(router, None)


class Shares:
    """How much of the fleet's time each tenant had lately, in seconds of prefill: what is cached
    costs nothing. Shares matter to a tenant while others have to wait."""

    def __init__(self) -> None:
        self._used_s: dict[str, float] = {}  # by tenant, as of _at_s
        self._total_s = 0.0
        self._at_s = 0.0
        self._waited_s: dict[str, float] = {}  # by tenant: when it last waited

    def use(self, tenant: str, prefill_s: float, now_s: float) -> None:
        self._decay(now_s)
        if tenant and (tenant in self._used_s or len(self._used_s) < MOST_TENANTS):
            self._used_s[tenant] = self._used_s.get(tenant, 0.0) + prefill_s
            self._total_s += prefill_s

    def see(self, tenants: Iterable[str], now_s: float) -> None:
        """These wait now, and not only for what others leave."""
        self._decay(now_s)
        self._waited_s.update(dict.fromkeys(tenants, now_s))

    def are_exceeded(self, tenant: str) -> bool:
        """Whether the tenant had clearly more than its equal share, and others had to wait."""
        used_s = self._used_s.get(tenant, 0.0)
        sharers = min(MOST_SHARERS, len(self._used_s))
        if sharers < 2 or used_s <= LEEWAY * self._total_s / sharers:
            return False
        return len(self._waited_s) > (tenant in self._waited_s)

    def _decay(self, now_s: float) -> None:
        """Once a second is enough."""
        if now_s - self._at_s < 1.0:
            return
        keep = math.exp((self._at_s - now_s) / SHARE_S)
        used_s = {tenant: keep * used_s for tenant, used_s in self._used_s.items()}
        self._used_s = {tenant: used for tenant, used in used_s.items() if used > FORGOTTEN_S}
        self._total_s = sum(self._used_s.values())
        self._waited_s = {
            tenant: at_s for tenant, at_s in self._waited_s.items() if now_s - at_s < SCARCE_S
        }
        self._at_s = now_s


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
