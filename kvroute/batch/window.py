"""How many requests of a batch are open at the same time.

Up to some number, more open requests mean more answers per second. The window looks for this
number: it doubles while that raises the throughput. When two doublings in a row were useless, the
first of them was enough. The window stays there for a while, and then it looks again, since the
cluster or its other work may have changed.

If lines wait in the cluster's queue for most of their time, the window is halved, unless this makes
the batch slower. So several batches share a cluster.

No constant here is a time, since what is fast on one cluster is slow on another one. The caller
passes the time, in seconds of any monotonic clock.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

# Size of the window at the start of the first search. A later search begins at this size or above.
START = 16
# A doubling of the window was worth it if it has multiplied the throughput by more than WORTH_IT.
# In a cluster without a queue, the throughput doubles with the window. If the throughput was
# multiplied by less than CLEAR, SURE answers are measured before the decision, since chance changes
# the time of a few answers by a third.
WORTH_IT, CLEAR, SURE = 1.125, 1.5, 64
LONG_WAIT = 2 / 3  # the window is halved if lines spend more than this share of their time waiting
# A halving of the window has made the batch slower if the throughput falls below this share. The
# throughput falls to 1/2 if lines wait for each other, or for many other batches. It does not fall
# if the cluster is busy.
SLOWER = 0.6
# After a search, the size is kept for this many answers for each open request.
STAYS = 16
BACK = 4  # the next search begins at the present size divided by this number


class Level(NamedTuple):
    """The throughput with one size of the window."""

    size: float
    per_s: float  # answers per second


NOTHING = Level(0.0, 1e-9)


class Window:
    """The number of open requests of one batch.

    Args:
        limit: returns the most requests that may be open.
    """

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._size = float(START)
        self._skipped = 0
        self._now_s: float | None = None  # time of the latest answer
        self._start_s: float | None = None  # start of the round
        self._found = math.inf  # result of the latest search
        self._search(START)

    @property
    def size(self) -> int:
        """Return the number of requests that may be open now."""
        return max(1, min(round(self._size), self._limit()))

    def answered(self, now_s: float, *, took_s: float, waited_s: float = 0.0) -> None:
        """Record the answer to a line.

        Args:
            now_s: the current time.
            took_s: seconds from the sending of the line to its answer.
            waited_s: the part of them in the cluster's queue; 0 if the cluster does not say it.
        """
        self._now_s = now_s
        if self._start_s is None:
            self._start_s = now_s - took_s
        if self._skipped:
            self._skipped -= 1
            self._start_s = now_s
            return
        self._answers += 1
        self._took_s += took_s
        self._waited_s += waited_s
        if self._answers <= self._needed:
            self._size += self._growth
        if self._answers >= self._needed:
            level = Level(self._level, self._answers / max(1e-9, now_s - self._start_s))
            is_waiting = self._waited_s > LONG_WAIT * self._took_s
            if self._is_searching:
                self._go_on(level, is_waiting=is_waiting)
            else:
                self._remain(level, is_waiting=is_waiting)

    def lost(self) -> None:
        """Record that the cluster could not answer a line: it may have lost replicas."""
        if not self._skipped:  # otherwise, the window was made smaller after this line was sent
            self._search(max(1.0, self._size / 2))
            self._skipped = math.ceil(2 * self._size)

    def _begin(self, size: float, *, grows: bool = False) -> None:
        """Begin a round, in which the throughput of one size is measured.

        Args:
            size: the size. If it is smaller than before, the answers to the lines that are open now
                are not measured.
            grows: whether the window doubles during the round. What is measured is still the
                throughput of `size`, since answers come later than their lines are sent.
        """
        is_smaller = self._now_s is not None and size < self._size
        self._skipped = math.ceil(self._size) if is_smaller else 0
        self._level = self._size = size
        self._needed = math.ceil(size)  # answers
        self._growth = size / self._needed if grows else 0.0
        self._start_s = self._now_s
        self._answers = 0
        self._took_s = self._waited_s = 0.0  # sums over the answers of this round

    # The search for the best size.

    def _search(self, size: float) -> None:
        """Begin a search, at a size that may be too small."""
        self._is_searching = True
        self._best = NOTHING  # the latest size for which a doubling was worth it
        self._is_doubtful = False  # whether the doubling after it was useless
        self._begin(size, grows=True)

    def _go_on(self, level: Level, *, is_waiting: bool) -> None:
        """Double the window again, or end the search."""
        rise = level.per_s / self._best.per_s
        if rise < CLEAR and self._answers < max(SURE, 2 * self._needed):
            return
        # Beyond what was enough before, a smaller rise may only take from other batches.
        is_worth_it = rise > (CLEAR if level.size > self._found else WORTH_IT)
        if level.size >= self._limit():
            self._stay(self._limit())
        elif is_worth_it and is_waiting and rise < 1 / SLOWER:
            self._stay(level.size)
        elif is_worth_it:
            self._best, self._is_doubtful = level, False
            self._begin(2 * level.size, grows=True)
        elif level.size < self._found and not self._is_doubtful:
            self._is_doubtful = True
            self._begin(2 * level.size)
        else:
            self._stay(min(2 * self._best.size, max(self._best.size, self._found)))

    # The time between two searches.

    def _stay(self, size: float) -> None:
        """End the search, and keep a size for a while."""
        self._is_searching = False
        self._found = size
        self._left = STAYS * size  # answers until the next search
        self._halved = NOTHING  # the size before it was halved; NOTHING: it was not halved
        self._may_halve = True
        self._begin(size)

    def _remain(self, level: Level, *, is_waiting: bool) -> None:
        """Halve the window if lines wait too long, or undo this if it has made the batch slower."""
        if self._answers < SURE:
            return
        self._left -= self._answers
        halved, self._halved = self._halved, NOTHING
        if self._left <= 0:
            self._search(min(level.size, max(START, level.size / BACK)))
        elif level.per_s < SLOWER * halved.per_s:
            self._may_halve = False
            self._begin(halved.size)
        elif is_waiting and self._may_halve and level.size > 1:
            self._halved = level
            self._begin(level.size / 2)
        else:
            self._begin(level.size)
