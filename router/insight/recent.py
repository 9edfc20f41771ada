"""What one router did lately: its last decisions, and where five minutes' tokens came from."""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

import msgspec

from router.routing.ledger import CAUSES, Ledger
from router.routing.trips import Trip, Witness

DECISIONS = 50  # that are remembered
WINDOW_S = 300.0  # that the sums are of
BUCKET_S = 5.0  # of the window, forgotten together


class Sums(msgspec.Struct, frozen=True):
    """What the prompts of some requests add up to."""

    requests: int
    tokens: Ledger

    @property
    def hit_tokens(self) -> int:
        return self.tokens.hit + self.tokens.surprise

    @property
    def prompt_tokens(self) -> int:
        return sum(msgspec.structs.astuple(self.tokens))


class Window:
    """Sums over the last WINDOW_S, by replica; replicas without a request in it are forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, dict[str, list[int]]]] = deque()  # oldest first
        self._totals: dict[str, list[int]] = {}  # of all buckets: requests, then the causes

    def add(self, replica_id: str, ledger: Ledger) -> None:
        """A request was answered there."""
        now = self._roll()
        if not self._buckets or self._buckets[-1][0] != now:
            self._buckets.append((now, {}))
        counts = (1, *msgspec.structs.astuple(ledger))
        for sums in (self._buckets[-1][1], self._totals):
            sums[replica_id] = list(map(add, sums.get(replica_id) or NOTHING, counts))

    def sums(self) -> dict[str, Sums]:
        self._roll()
        return {
            replica_id: Sums(requests, Ledger(*tokens))
            for replica_id, (requests, *tokens) in self._totals.items()
        }

    def _roll(self) -> int:
        """Forgets what is too old. The number of the bucket of now."""
        now = int(self._clock() // BUCKET_S)
        while self._buckets and self._buckets[0][0] <= now - WINDOW_S // BUCKET_S:
            for replica_id, counts in self._buckets.popleft()[1].items():
                left = list(map(sub, self._totals[replica_id], counts))
                if left[0]:
                    self._totals[replica_id] = left
                else:
                    del self._totals[replica_id]
        return now


def summed(sums: Collection[Sums]) -> dict[str, Any]:
    """What they add up to, for people and programs."""
    return {
        "window_s": WINDOW_S,
        "requests": sum(each.requests for each in sums),
        "tokens": {cause: sum(getattr(each.tokens, cause) for each in sums) for cause in CAUSES},
    }


NOTHING = (0,) * (1 + len(CAUSES))


@dataclass(slots=True)
class Decision:
    """A request that was sent to a replica. Whoever tells of it keeps the words for the next."""

    number: int  # in the order of sending
    at_s: float  # since 1970
    trip: Trip
    receipt: msgspec.Raw | None = field(default=None, repr=False)
    told: bytes = b""  # what there is to tell, once it is over


class Recent(Witness):
    """A few microseconds a request, and the placements of the last DECISIONS in memory."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)  # oldest first
        self.under_way = 0  # requests sent and not ended
        self.window = Window(clock)
        self._sent = 0

    def sent(self, trip: Trip) -> None:
        self.under_way += 1
        self._sent += 1
        self.decisions.append(Decision(self._sent, time.time(), trip))

    def ended(self, trip: Trip) -> None:
        self.under_way -= 1
        if (ledger := trip.ledger()) is not None:
            self.window.add(trip.replica_id, ledger)
