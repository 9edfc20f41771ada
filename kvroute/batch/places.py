"""How many lines of one batch the cluster accepts at a time, as its refusals (429) show.

A cluster refuses a line if a limit of its tenant is reached, or if its queue is full. What it
accepts changes with the tenant's other requests, and with those of others. So a refused line is
sent again as soon as another line of the batch is answered, since its place may be free now. One
more line is tried when the time is over that the refusal named, then two more, four more, and so on
until the next refusal. The caller passes the time, in seconds of any monotonic clock.
"""

import math

# Shortest time in seconds until one more line is tried, for refusals that name no time.
MIN_PAUSE_S = 0.5
# A router learns some milliseconds later than its client that a line has ended at another router.
# So if the cluster has accepted more lines before, this share of the time is waited.
SOON = 1 / 16


class Places:
    """The number of lines that the cluster accepts from one batch."""

    def __init__(self) -> None:
        self.count = math.inf  # lines that may be open; inf: none was refused
        self._more_at_s = math.inf  # time when more lines are tried; inf: none was refused
        self._pause_s = MIN_PAUSE_S  # seconds between two such times
        self._more = 1  # lines to try in addition at the next such time
        self._accepted = 0.0  # lines that the cluster has accepted at the same time
        self._is_restored = False  # whether `count` was raised to `_accepted` again

    def wait_s(self, now_s: float) -> float | None:
        """Return the seconds until more lines are tried; None: no line was refused."""
        return None if math.isinf(self._more_at_s) else max(0.0, self._more_at_s - now_s)

    def refused(self, now_s: float, *, open_lines: int, again_s: float) -> None:
        """Record that the cluster refused a line.

        Args:
            now_s: the current time.
            open_lines: the other lines of the batch that are open.
            again_s: seconds after which to try again; 0 if the refusal does not name them.
        """
        if self._is_restored:
            self._accepted, self._is_restored = min(self._accepted, open_lines), False
        is_below = open_lines < self._accepted
        self.count, self._more = open_lines, 1
        self._pause_s = max(MIN_PAUSE_S, again_s)
        self._more_at_s = now_s + self._pause_s * (SOON if is_below else 1.0)

    def answered(self, open_lines: int) -> None:
        """Record that the cluster answered a line, whose place is free now.

        Args:
            open_lines: the other lines of the batch that are open.
        """
        self._is_restored = False
        if self.count < math.inf:
            self._accepted = max(self._accepted, min(self.count, open_lines + 1))
        self.count = max(self.count, self._accepted)

    def try_more(self, now_s: float, *, enough: int) -> None:
        """Raise the number if its time has come.

        Args:
            now_s: the current time.
            enough: the most lines that the batch needs; it then needs no further tries.
        """
        if now_s < self._more_at_s:
            return
        self._more_at_s = now_s + self._pause_s
        if self.count < self._accepted:
            self.count, self._is_restored = self._accepted, True
            return
        self._accepted = self.count
        self.count += self._more
        self._more *= 2
        if self.count > enough:
            self.count = self._more_at_s = math.inf
