"""What forecasts of waits need besides the queue: the load that comes, and earlier errors.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.
"""

import math

RECENT_S = 10.0  # time constant of the mean of what came
STEP_S = 5.0  # of delay; what differs by less counts as equal
TRACE_S = 1e-3  # of prefill; less is forgotten
KEEP = 0.95  # of the earlier waits' weight, at each further one
PRIOR_S = 5.0  # of waits as forecast, before any was seen
LEAST, MOST = 0.25, 4.0  # bounds of a correction


class Arrivals:
    """Seconds of prefill that came each second, of late."""

    def __init__(self) -> None:
        self._recent_s: dict[int, float] = {}  # of prefill, by delay in steps; as of _at_s
        self._at_s = 0.0

    def add(self, prefill_s: float, delay_s: float, now_s: float) -> None:
        """delay_s: from its arrival to its turn."""
        keep = math.exp((self._at_s - now_s) / RECENT_S)
        step = round(delay_s / STEP_S)
        self._recent_s = {at: keep * each for at, each in self._recent_s.items() if each > TRACE_S}
        self._recent_s[step] = self._recent_s.get(step, 0.0) + prefill_s
        self._at_s = now_s

    def per_second(self, lead_s: float, now_s: float) -> float:
        """Of what will come within the next lead_s, as far as its turn comes within it too."""
        if lead_s <= 0:
            return 0.0
        recent_s = sum(
            each * max(0.0, 1.0 - max(0.0, at * STEP_S) / lead_s)
            for at, each in self._recent_s.items()
        )
        return recent_s * math.exp((self._at_s - now_s) / RECENT_S) / RECENT_S


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
