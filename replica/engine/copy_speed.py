"""The speed of copies from host memory: the engine's claim, corrected by measured copies."""

import math

from kvroute.prefill.speed import Speed

MEMORY = 4.0  # number of copies after which an earlier copy weighs 1/e
FADE_S = 300.0  # seconds without copies after which 1/e of a learned slowness is left


class CopySpeed:
    """The speed of one engine's copies; the caller passes the time, in seconds of any clock."""

    def __init__(self, claimed_bytes_per_s: float) -> None:
        self._claimed = claimed_bytes_per_s
        self._speed = Speed(memory=MEMORY)
        self._copied_s = -math.inf  # time of the last reported copy

    def copied(self, copied_bytes: int, seconds: float, now_s: float) -> None:
        """Learn from copies to the engine, starting from the slowness as it has faded until now."""
        if copied_bytes <= 0 or seconds <= 0.0:
            return
        self._speed.set_slowness(self._slowness(now_s))
        self._speed.learn(copied_bytes / self._claimed, seconds)
        self._copied_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """Return the expected speed of a copy."""
        return self._claimed / self._slowness(now_s)

    def _slowness(self, now_s: float) -> float:
        """Return the learned slowness, which fades with time.

        It has to fade: a slow tier gets no further reloads, so that nothing would ever show that
        the tier has become fast again.
        """
        extra = self._speed.slowness - 1.0
        if extra <= 0.0:
            return self._speed.slowness
        return 1.0 + extra * math.exp((self._copied_s - now_s) / FADE_S)
