"""How fast blocks come back from host memory: an engine's claim, corrected by its copies."""

import math

from kvroute.prefill.speed import Speed

MEMORY = 4.0  # copies after which an earlier one weighs 1/e
FADE_S = 300.0  # time without copies after which 1/e of a learned slowness is left


class CopySpeed:
    """Of one engine; the caller passes the time, in seconds of any one clock."""

    def __init__(self, claimed_bytes_per_s: float) -> None:
        self._claimed = claimed_bytes_per_s
        self._speed = Speed(memory=MEMORY)
        self._copied_s = -math.inf  # when the last copy was reported

    def copied(self, copied_bytes: int, seconds: float, now_s: float) -> None:
        """Some copies to the engine, which took so long. What has faded until now stays so."""
        if copied_bytes <= 0 or seconds <= 0.0:
            return
        self._speed.believe(self._slowness(now_s))
        self._speed.learn(copied_bytes / self._claimed, seconds)
        self._copied_s = now_s

    def bytes_per_s(self, now_s: float) -> float:
        return self._claimed / self._slowness(now_s)

    def _slowness(self, now_s: float) -> float:
        """A tier that was slow gets no further reloads, and nothing else would tell that it is fast
        now: so what was learned of it has to fade."""
        extra = self._speed.slowness - 1.0
        if extra <= 0.0:
            return self._speed.slowness
        return 1.0 + extra * math.exp((self._copied_s - now_s) / FADE_S)
