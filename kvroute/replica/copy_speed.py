"""How fast blocks come back from host memory: an engine's claim, corrected by its copies."""

import math

PRIOR_S = 0.001  # weight of the claim itself, in seconds of copying
KEEP = 0.9  # weight of what was known, beside one more report of copies
FADE_S = 300.0  # without a copy; then slow ones are believed less: where they are slow, none come


class CopySpeed:
    """Of one engine; the caller passes the time, in seconds of any monotonic clock."""

    def __init__(self, claimed_bytes_per_s: float) -> None:
        self._claimed = claimed_bytes_per_s
        self._bytes = claimed_bytes_per_s * PRIOR_S  # this and the next: decayed sums
        self._seconds = PRIOR_S
        self._copied_s = 0.0  # when the last copy was reported

    def copied(self, copied_bytes: int, seconds: float, now_s: float) -> None:
        """Some copies to the engine, which took so long."""
        if copied_bytes <= 0 or seconds <= 0.0:
            return
        self._bytes = KEEP * self._bytes + copied_bytes
        self._seconds = KEEP * self._seconds + seconds
        self._copied_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        slowness = self._claimed * self._seconds / self._bytes
        if slowness > 1.0:
            slowness = 1.0 + (slowness - 1.0) * math.exp((self._copied_s - now_s) / FADE_S)
        return self._claimed / slowness
