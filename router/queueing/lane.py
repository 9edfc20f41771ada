"""The batch requests that wait in a router: which of them is sent next, and to which replica.

Batch requests give way to others in the engines (contract/priority.py). So they do not wait until
other requests have left the router. They wait for room: a replica takes a limited number of batch
requests, and more of them while it has no other requests (LaneRoom in placement/loads.py).

A request goes to the replica with the lowest cost, in which the cached part of its prompt counts.
If it has no room, the request goes to the next replica in the ranking that has room. But a request
with a large cache hit never skips the replica with the longest hit (Placement.holder_id). While
that replica has no room, the request waits for it, and later requests may pass.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvroute.router.placement.attempts import Placement
from kvroute.router.placement.loads import LaneRoom, ReplicaCapacity, RoomState
from kvroute.router.placement.policy import Candidate

# Only this many requests at the front are examined, which limits the time of a search.
LOOKED_AT = 512
# Time after which a request that waits for a replica is placed again, in Scale.busy_s. Meanwhile,
# the replica may have evicted the prompt, or got a long backlog.
PLACED = 1.0

# Ranks the replicas with these ids for one request, given the current time.
Place = Callable[[Sequence[str], float], Placement]
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class LaneRequest(Generic[R]):
    """A batch request that waits."""

    request: R  # the caller's object for the request; the lane does not use it
    order_s: float  # requests are sent in this order, as far as replicas have room
    place: Place
    awaited_id: str = ""  # the replica that it waits for; empty: none
    placed_s: float = 0.0  # time of its latest placement


class Lane(Generic[R]):
    """The batch requests that wait in one router for one model.

    Args:
        busy_s: returns Scale.busy_s, the fleet's unit of time in seconds.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self._requests: list[LaneRequest[R]] = []
        # Replica -> the state of its room when a request did not fit. The replica is tried again
        # only after this state has changed.
        self._full: dict[str, RoomState] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[R]:
        return (waiting.request for waiting in self._requests)

    def add(self, request: R, order_s: float, place: Place) -> None:
        """Add a request, after those with the same order time."""
        insort(self._requests, LaneRequest(request, order_s, place), key=_order)

    def remove(self, request: R, order_s: float) -> bool:
        """Remove a request. Return False if it does not wait here."""
        index = bisect_left(self._requests, order_s, key=_order)
        while index < len(self._requests) and self._requests[index].order_s == order_s:
            if self._requests[index].request is request:
                del self._requests[index]
                return True
            index += 1
        return False

    def pop_before(self, order_s: float) -> Iterator[R]:
        """Remove and return the requests with an earlier order time."""
        while self._requests and self._requests[0].order_s < order_s:
            yield self._requests.pop(0).request

    def pop_next(self, replicas: Sequence[ReplicaCapacity], now_s: float) -> tuple[R, str] | None:
        """Remove and return the next request to send, and its replica; None if none may be sent.

        Args:
            replicas: the replicas that take requests, with their room for batch requests.
        """
        rooms = {
            replica.replica_id: replica.lane
            for replica in replicas
            if replica.lane is not None
            and replica.lane.is_open
            and self._full.get(replica.replica_id) != replica.lane.state
        }
        ids = [replica.replica_id for replica in replicas]
        if len(self._full) > len(ids):  # replicas have left
            self._full.clear()
        for index, waiting in enumerate(self._requests[:LOOKED_AT]):
            if not rooms:
                break
            if replica_id := self._replica_for(waiting, ids, rooms, now_s):
                del self._requests[index]
                return waiting.request, replica_id
        return None

    def _replica_for(
        self,
        waiting: LaneRequest[R],
        ids: Sequence[str],
        rooms: dict[str, LaneRoom],
        now_s: float,
    ) -> str | None:
        """Return the replica to which a request can be sent now.

        Replicas on which it does not fit are removed from `rooms`, so that no later request takes
        the room for which this one waits.
        """
        is_placed = now_s < waiting.placed_s + PLACED * self._busy_s()
        if waiting.awaited_id and waiting.awaited_id not in rooms and is_placed:
            return None
        placement = waiting.place(ids, now_s)
        waiting.placed_s, waiting.awaited_id = now_s, ""
        for candidate in placement.ranking:
            room = rooms.get(candidate.replica_id)
            if room is not None:
                if _fits(room, candidate, placement):
                    self._full.pop(candidate.replica_id, None)
                    return candidate.replica_id
                self._full[candidate.replica_id] = room.state
                del rooms[candidate.replica_id]
            if candidate.replica_id == placement.holder_id:
                waiting.awaited_id = candidate.replica_id
                return None
        return None


def _fits(room: LaneRoom, candidate: Candidate, placement: Placement) -> bool:
    cached_tokens = candidate.hit_blocks * placement.block_size
    return room.fits(
        new_tokens=placement.prompt_tokens - cached_tokens,
        cached_tokens=cached_tokens,
        prefix=placement.known_prefix[-1] if placement.best_hit_blocks else None,
    )


def _order(waiting: LaneRequest[R]) -> float:
    return waiting.order_s
