"""How long a request will wait: the work before it, the work that will pass it, earlier errors.

Arithmetic: no clocks, no sockets. Times are of a monotonic clock, in seconds.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

RECENT = 4.5  # time constant of the mean rate of arrivals, in Scale.busy_s
DELAYS = (*(0.11 * 2.0**k for k in range(10)), math.inf)  # upper bounds of classes, in Scale.busy_s
KEEP = 0.95  # weight of earlier waits that is left at each further wait
PRIOR = 2.3  # waits as forecast before any was seen, in Scale.busy_s
LEAST, MOST = 0.25, 4.0  # bounds of a correction
LATE = 0.02  # share of the requests near their limit that may wait longer than it
LATER = 0.1  # growth of the margin for each request that waits longer
NEAR = 0.5  # share of the limit above which forecasts are compared with waits
MAX_MARGIN = 4.0


class ArrivalRates:
    """Seconds of prefill that come each second, of late, by how much their turns are delayed.

    Args:
        busy_s: returns the fleet's unit of time, of its Scale.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        self._recent_s = [0.0] * len(
            DELAYS
        )  # seconds of prefill per class of delay, at the time _at_s
        self._at_s = 0.0

    def add(self, prefill_s: float, delay_s: float, now_s: float) -> None:
        """Record a request whose turn is so much later than its arrival."""
        busy_s = self._busy_s()
        keep = math.exp((self._at_s - now_s) / (RECENT * busy_s))
        self._recent_s = [keep * recent_s for recent_s in self._recent_s]
        self._recent_s[bisect_right(DELAYS, delay_s / busy_s)] += prefill_s
        self._at_s = now_s

    def sooner(self, now_s: float) -> list[float]:
        """Return what comes with a delay below each of DELAYS: seconds of prefill a second."""
        recent_s = RECENT * self._busy_s()
        scale = math.exp((self._at_s - now_s) / recent_s) / recent_s
        sums, total = [], 0.0
        for each_s in self._recent_s:
            total += scale * each_s
            sums.append(total)
        return sums


def waiting_s(
    ahead_s: float, lead_s: float, sooner: Sequence[float], replicas: int, busy_s: float
) -> float:
    """Return the time until the prefill that goes before a request is done.

    That is the prefill that is pending now, and prefill that comes meanwhile with an earlier turn:
    after t seconds, requests that are delayed by less than `lead_s - t`.

    Args:
        ahead_s: pending seconds of prefill.
        lead_s: time from now until the request's turn.
        sooner: from ArrivalRates.
        replicas: number of replicas.
        busy_s: the fleet's unit of time, from its Scale.
    """
    if replicas <= 0:
        return math.inf
    after_s = 0.0
    for at in range(bisect_right(DELAYS, lead_s / busy_s) - 1, -1, -1):
        span_s = lead_s - busy_s * DELAYS[at] - after_s
        done = replicas - sooner[at]  # seconds of prefill a second
        if ahead_s <= done * span_s:
            return after_s + ahead_s / done if done else after_s
        ahead_s -= done * span_s
        after_s += span_s
    return after_s + ahead_s / replicas


class Correction:
    """How much longer requests have waited than was forecast; a long wait teaches more."""

    def __init__(self, busy_s: float) -> None:
        self._waited_s = self._forecast_s = PRIOR * busy_s

    @property
    def factor(self) -> float:
        """Return the factor for the next forecast."""
        return min(MOST, max(LEAST, self._waited_s / max(self._forecast_s, 1e-9)))

    def learn(self, forecast_s: float, waited_s: float) -> None:
        """Learn from a wait and its forecast without a correction."""
        self._waited_s = KEEP * self._waited_s + waited_s
        self._forecast_s = KEEP * self._forecast_s + forecast_s


class Margin:
    """By which forecasts must stay below a request's limit, so that few wait in vain until then."""

    def __init__(self) -> None:
        self.factor = 1.0  # factor that a forecast is multiplied by, at least 1

    def learn(self, forecast_share: float, *, is_late: bool) -> None:
        """forecast_share: of the request's limit. is_late: it was refused after all."""
        if self.factor * forecast_share < NEAR:
            return
        by = LATER if is_late else -LATER * LATE / (1.0 - LATE)
        self.factor = min(MAX_MARGIN, max(1.0, self.factor * (1.0 + by)))
