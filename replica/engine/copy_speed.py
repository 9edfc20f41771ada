"""The speed of copies from host memory: the engine's first claim, corrected by measured copies.

The correction is the slowness: the measured time of a copy divided by its time at the claimed
speed.
"""

import math

from kvroute.prefill.speed import Speed

MEMORY = 4.0  # number of copies after which an earlier measurement weighs 1/e
# Seconds without a copy after which the part of the slowness above 1 has decayed to 1/e of itself.
FADE_S = 300.0


class CopySpeed:
    """The speed of one engine's copies. The caller passes the time, in seconds of any clock."""

    def __init__(self, claimed_bytes_per_s: float) -> None:
        self._claimed = claimed_bytes_per_s
        self._speed = Speed(memory=MEMORY)
        self._copied_s = -math.inf  # time of the last reported copy

    def record(self, copied_bytes: int, seconds: float, now_s: float) -> None:
        """Learn from measured copies from host memory to the engine.

        Args:
            copied_bytes: The size of the copies.
            seconds: The time that the copies took.
            now_s: The current time. The slowness learned earlier decays until then.
        """
        if copied_bytes <= 0 or seconds <= 0.0:
            return
        self._speed.set_slowness(self._slowness(now_s))
        self._speed.learn(copied_bytes / self._claimed, seconds)
        self._copied_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        """Return the expected speed of a copy."""
        return self._claimed / self._slowness(now_s)

    def _slowness(self, now_s: float) -> float:
        """Return the learned slowness. If it is above 1, it decays towards 1 with time.

        Without the decay, a host tier that was slow once would never be used again: blocks are not
        reloaded from a slow tier, so no measurement could show that it has become fast.
        """
        extra = self._speed.slowness - 1.0
        if extra <= 0.0:
            return self._speed.slowness
        return 1.0 + extra * math.exp((self._copied_s - now_s) / FADE_S)
