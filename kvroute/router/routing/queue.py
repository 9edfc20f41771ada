"""Requests wait in the router while every replica has enough to do. Arithmetic: no clocks, no
sockets."""

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

HOLD_S = 2.0  # of prefill on every replica: requests wait in the router
SECONDS_FOR_SECOND = 20.0  # of later arrival, for each second of prefill
WAKE_S = 0.02  # between two looks at the replicas while requests wait

R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Held(Generic[R]):
    """A request that waits."""

    request: R
    arrived_s: float
    prefill_s: float  # predicted, of what no replica has cached

    @property
    def order_s(self) -> float:
        return self.arrived_s + SECONDS_FOR_SECOND * self.prefill_s


class Queue(Generic[R]):
    """One router's waiting requests."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Held[R]]] = []
        self._count = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, held: Held[R]) -> None:
        heappush(self._heap, (held.order_s, next(self._count), held))

    def is_turn(self, open_replicas: int) -> bool:
        return open_replicas > 0

    def next(self) -> Held[R]:
        return heappop(self._heap)[2]
