"""The order of eviction among queues of idle blocks: the queue with the oldest head is first."""

import math
from collections.abc import Iterable
from enum import Enum, auto
from heapq import heapify, heappop, heapreplace

from kvroute.replica.engine.idle_queue import LEARNED, IdleQueue


class Among(Enum):
    """The queues from which blocks are evicted."""

    PLAIN = auto()  # queues without a promise
    PROMISED = auto()  # queues with a promise, because all other queues are empty
    BEYOND = auto()  # both, because promised blocks exceed their share: some promises are ignored


# An order of queues is used for at most LOOK_S seconds, and at most for FRESH times the idle time
# of the first head.
LOOK_S = 0.2
FRESH = 0.02


class Heads:
    """The queues in the order of their heads' ages at one time.

    The order stays valid for a short time: blocks may be evicted or held again meanwhile, and
    blocks that become idle later are younger.
    """

    def __init__(
        self, among: Among, queues: Iterable[IdleQueue], ignored: dict[int, int], now_s: float
    ) -> None:
        """Sort the queues; `ignored` maps a tenant's class to its number of ignored promises."""
        self.among = among
        self._ignored = ignored
        self._now_s = now_s
        filled = [queue for queue in queues if queue.blocks]
        self._heap = [(-self._age(queue), place, queue) for place, queue in enumerate(filled)]
        heapify(self._heap)
        idle_s = now_s - _since_s(self._heap[0][2]) if filled else 0.0
        self._until_s = now_s + min(LOOK_S, FRESH * idle_s)

    def holds(self, among: Among, now_s: float) -> bool:
        """Return whether the order can still be used."""
        return self.among is among and now_s <= self._until_s

    def next(self) -> tuple[IdleQueue, float, float] | None:
        """Return the queue with the oldest head, or None if no queue is left.

        Returns:
            The queue; the time since which its blocks must have been idle to be evicted before the
            heads of other queues; and the maximum number of blocks to evict from it.
        """
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
        """Record that blocks of the queue were evicted."""
        if queue.still_s and self.among is Among.BEYOND:
            self._ignored[queue.kind.tenant] -= blocks
            if queue.kind.tenant == LEARNED and self._ignored[LEARNED] <= 0:
                self._until_s = -math.inf  # from now on, promises of tenants may be ignored

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
