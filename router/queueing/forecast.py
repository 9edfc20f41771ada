"""Predicts how long a request will wait in the queue.

The prediction counts the prefill of the requests that are before it in the queue, and of those that
will arrive later and pass it. It is corrected by the errors of earlier predictions.

This module only computes: it uses no clock and no socket. Times are seconds of a monotonic clock.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence

# Some constants are multiples of Scale.busy_s, the fleet's unit of time (placement/scale.py).

RECENT = 4.5  # time constant with which the mean rate of arrivals decays, in Scale.busy_s
# Arrivals are counted in classes of delay: the time from a request's arrival to its order time, by
# which the queue is sorted. These are the upper bounds of the classes, in Scale.busy_s.
DELAYS = (*(0.11 * 2.0**k for k in range(10)), math.inf)
KEEP = 0.95  # after each wait, the weight of all earlier waits is multiplied by this
# The correction starts as if waits of this total length had been predicted exactly, in
# Scale.busy_s.
PRIOR = 2.3
MIN_CORRECTION, MAX_CORRECTION = 0.25, 4.0  # bounds of the correction factor
LATE = 0.02  # share of the requests near their limit that may be refused after a wait
LATER = 0.1  # relative growth of the margin for each request that is refused after a wait
NEAR = 0.5  # a request is near its limit if its forecast is at least this share of the limit
MAX_MARGIN = 4.0  # upper bound of the margin's factor


class ArrivalRates:
    """The recent rate of arrivals, in seconds of prefill per second, by class of delay.

    A request's delay is the time from its arrival to its order time (see queue.py).

    Args:
        busy_s: returns Scale.busy_s, the fleet's unit of time.
    """

    def __init__(self, busy_s: Callable[[], float]) -> None:
        self._busy_s = busy_s
        # Seconds of prefill that arrived, by class of delay, decayed until the time _updated_s.
        self._recent_s = [0.0] * len(DELAYS)
        self._updated_s = 0.0

    def add(self, prefill_s: float, delay_s: float, now_s: float) -> None:
        """Record a request whose order time is `delay_s` later than its arrival."""
        busy_s = self._busy_s()
        keep = math.exp((self._updated_s - now_s) / (RECENT * busy_s))
        self._recent_s = [keep * recent_s for recent_s in self._recent_s]
        self._recent_s[bisect_right(DELAYS, delay_s / busy_s)] += prefill_s
        self._updated_s = now_s

    def sooner(self, now_s: float) -> list[float]:
        """Return, for each bound in DELAYS, the rate of arrivals with a smaller delay.

        Rates are in seconds of prefill per second.
        """
        recent_s = RECENT * self._busy_s()
        scale = math.exp((self._updated_s - now_s) / recent_s) / recent_s
        sums, total = [], 0.0
        for prefill_s in self._recent_s:
            total += scale * prefill_s
            sums.append(total)
        return sums


def waiting_s(
    ahead_s: float, lead_s: float, sooner: Sequence[float], replicas: int, busy_s: float
) -> float:
    """Return the seconds until all prefill that goes before a request is done.

    This is the prefill that is pending now, and the prefill of requests that arrive meanwhile with
    an earlier order time. A request that arrives after t seconds has an earlier order time if its
    delay is less than `lead_s - t`.

    Args:
        ahead_s: seconds of prefill that are pending before the request.
        lead_s: seconds from now until the request's order time.
        sooner: rates of arrivals, from ArrivalRates.sooner.
        replicas: number of replicas.
        busy_s: Scale.busy_s, the fleet's unit of time.
    """
    if replicas <= 0:
        return math.inf
    after_s = 0.0
    for index in range(bisect_right(DELAYS, lead_s / busy_s) - 1, -1, -1):
        span_s = lead_s - busy_s * DELAYS[index] - after_s
        # Seconds of prefill per second by which the work before the request shrinks.
        progress = replicas - sooner[index]
        if ahead_s <= progress * span_s:
            return after_s + ahead_s / progress if progress else after_s
        ahead_s -= progress * span_s
        after_s += span_s
    return after_s + ahead_s / replicas


class Correction:
    """Corrects forecasts by the ratio of measured to predicted waits. Long waits weigh more."""

    def __init__(self, busy_s: float) -> None:
        self._waited_s = self._forecast_s = PRIOR * busy_s

    @property
    def factor(self) -> float:
        """Return the factor that the next forecast has to be multiplied by."""
        ratio = self._waited_s / max(self._forecast_s, 1e-9)
        return min(MAX_CORRECTION, max(MIN_CORRECTION, ratio))

    def learn(self, forecast_s: float, waited_s: float) -> None:
        """Learn from a wait and from its forecast before the correction."""
        self._waited_s = KEEP * self._waited_s + waited_s
        self._forecast_s = KEEP * self._forecast_s + forecast_s


class Margin:
    """A safety margin for forecasts.

    It makes sure that only few requests wait up to their limit and are refused then. Other requests
    that would wait too long are refused when they arrive.
    """

    def __init__(self) -> None:
        self.factor = 1.0  # factor that a forecast is multiplied by, at least 1

    def learn(self, forecast_share: float, *, is_late: bool) -> None:
        """Adjust the margin after a request has left the queue.

        Args:
            forecast_share: the request's forecast as a share of its limit.
            is_late: whether the request waited up to its limit and was refused.
        """
        if self.factor * forecast_share < NEAR:
            return
        # If the share LATE of these requests is late, growth and shrinking cancel out.
        growth = LATER if is_late else -LATER * LATE / (1.0 - LATE)
        self.factor = min(MAX_MARGIN, max(1.0, self.factor * (1.0 + growth)))
