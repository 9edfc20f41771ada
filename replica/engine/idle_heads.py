"""Which queue of idle blocks goes next, as of one time: their heads, the largest age first."""

import math
from collections.abc import Iterable
from enum import Enum, auto
from heapq import heapify, heappop, heapreplace

from kvroute.replica.engine.idle_queue import LEARNED, IdleQueue


class Among(Enum):
    """Which queues have the next block to go."""

    PLAIN = auto()  # those without a promise
    PROMISED = auto()  # nothing else is left
    BEYOND = auto()  # promises hold more than their share: some are ignored


LOOK_S = 0.2  # the longest for which an order holds ...
FRESH = 0.02  # ... and as a share of the first head's idle time


class Heads:
    """Blocks may be evicted, and may be held again; those that become idle later are younger.

    ignored: by tenant's class, blocks whose promise is ignored.
    """

    def __init__(
        self, among: Among, queues: Iterable[IdleQueue], ignored: dict[int, int], now_s: float
    ) -> None:
        self.among = among
        self._ignored = ignored
        self._now_s = now_s
        filled = [queue for queue in queues if queue.blocks]
        self._heap = [(-self._age(queue), place, queue) for place, queue in enumerate(filled)]
        heapify(self._heap)
        idle_s = now_s - _since_s(self._heap[0][2]) if filled else 0.0
        self._until_s = now_s + min(LOOK_S, FRESH * idle_s)

    def holds(self, among: Among, now_s: float) -> bool:
        """The order is still right, nearly."""
        return self.among is among and now_s <= self._until_s

    def next(self) -> tuple[IdleQueue, float, float] | None:
        """The queue; since when its blocks must be idle to go before other heads; and how many of
        them may. None: there is no queue left."""
        heap = self._heap
        while heap:
            age, place, queue = heap[0]
            left = self._left(queue)
            if not queue.blocks or left <= 0:
                heappop(heap)
                continue
            younger = -self._age(queue)
            if younger <= age:
                second = -min(heap[1:3])[0] if len(heap) > 1 else -math.inf
                return queue, queue.since_s(second, self._now_s, self._still_s(queue)), left
            heapreplace(heap, (younger, place, queue))
        return None

    def went(self, queue: IdleQueue, blocks: int) -> None:
        """They were evicted."""
        if queue.still_s and self.among is Among.BEYOND:
            self._ignored[queue.kind.tenant] -= blocks
            if queue.kind.tenant == LEARNED and self._ignored[LEARNED] <= 0:
                self._until_s = -math.inf  # others' promises may be ignored now

    def _left(self, queue: IdleQueue) -> float:
        if queue.still_s and self.among is Among.BEYOND:
            return self._ignored[queue.kind.tenant]
        return math.inf

    def _age(self, queue: IdleQueue) -> float:
        return queue.age(_since_s(queue), self._now_s, self._still_s(queue))

    def _still_s(self, queue: IdleQueue) -> float:
        return 0.0 if self.among is Among.BEYOND else queue.still_s


def _since_s(queue: IdleQueue) -> float:
    return next(iter(queue.blocks.values()))
