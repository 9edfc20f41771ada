"""What forecasts of waits need besides the queue: the load that comes, and earlier errors.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.
"""

import math

RECENT_S = 10.0  # time constant of the mean of what came
KEEP = 0.95  # of the earlier waits' weight, at each further one
PRIOR_S = 5.0  # of waits as forecast, before any was seen
LEAST, MOST = 0.25, 4.0  # bounds of a correction


class Arrivals:
    """Seconds of prefill that come each second, of late."""

    def __init__(self) -> None:
        self._recent_s = 0.0  # of prefill, as of _at_s
        self._at_s = 0.0

    def add(self, prefill_s: float, now_s: float) -> None:
        self._recent_s = self._recent(now_s) + prefill_s
        self._at_s = now_s

    def per_second(self, now_s: float) -> float:
        return self._recent(now_s) / RECENT_S

    def _recent(self, now_s: float) -> float:
        return self._recent_s * math.exp((self._at_s - now_s) / RECENT_S)


class Correction:
    """How much longer requests have waited than was forecast; a long wait teaches more."""

    def __init__(self) -> None:
        self._waited_s = self._forecast_s = PRIOR_S

    @property
    def factor(self) -> float:
        """For the next forecast."""
        return min(MOST, max(LEAST, self._waited_s / max(self._forecast_s, 1e-9)))

    def learn(self, forecast_s: float, waited_s: float) -> None:
        """forecast_s: without a correction."""
        self._waited_s = KEEP * self._waited_s + waited_s
        self._forecast_s = KEEP * self._forecast_s + forecast_s
