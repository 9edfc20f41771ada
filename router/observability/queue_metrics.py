"""Metrics of a router's queue: waiting requests, their waits, and rejected requests.

The labels are lines, priorities and reasons, so the number of series is fixed.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvroute.contract.priority import PRIORITIES, Priority
from kvroute.features import REFUSALS
from kvroute.process.exposition import Readings
from kvroute.router.placement.attempts import RequestObserver
from kvroute.router.placement.waits import QueueRefusal, TakenBack, Wait
from kvroute.router.queueing.queue import Queue, QueueState

# Upper bounds of histogram buckets, in seconds.
WAITS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
MIN_WAIT_S = 0.1  # shorter waits and forecasts do not count for the accuracy of forecasts
# Upper bounds of histogram buckets for ratios of measured to predicted times.
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2, 4, 10)


class QueueMetrics(RequestObserver):
    """Measures the waits of requests, and counts the requests that the queue rejected."""

    def __init__(self, registry: CollectorRegistry) -> None:
        waits = Histogram(
            "kvroute_queue_wait_seconds",
            "Time that requests waited in the router because every replica was busy. Requests that "
            "did not have to wait are not counted.",
            ("priority",),
            buckets=WAITS_S,
            registry=registry,
        )
        refusals = Counter(
            "kvroute_queue_refused_requests",
            "Requests that the queue rejected, by reason: forecast (the predicted wait was above "
            "their limit), deadline (they waited up to their limit), full (too many requests "
            "waited), no_replica (no replica was ready)"
            + "".join(f", {reason} ({text.metric})" for reason, text in REFUSALS.items())
            + ".",
            ("priority", "reason"),
            registry=registry,
        )
        taken_back = Counter(
            "kvroute_queue_taken_back_requests",
            "Requests taken back from a replica whose engine had not started them, by reason: "
            "moved (another replica was able to start them), deadline (they waited up to their "
            "limit, and are rejected).",
            ("reason",),
            registry=registry,
        )
        self._ratio = Histogram(
            "kvroute_queue_forecast_ratio",
            "Time that requests waited in the router, divided by the wait predicted at arrival.",
            buckets=RATIOS,
            registry=registry,
        )
        # All series start at 0, so that Prometheus's rate() includes the first event.
        self._waits = {priority: waits.labels(priority) for priority in PRIORITIES}
        self._refusals = {
            labels: refusals.labels(*labels)
            for labels in product(PRIORITIES, [*get_args(QueueRefusal), *REFUSALS])
        }
        self._taken_back = {why: taken_back.labels(why) for why in get_args(TakenBack)}

    def taken_back(self, why: TakenBack) -> None:
        self._taken_back[why].inc()

    def waited(self, wait: Wait) -> None:
        self._waits[wait.priority].observe(wait.waited_s)
        if MIN_WAIT_S < max(wait.forecast_s, wait.waited_s) < math.inf:
            self._ratio.observe(wait.waited_s / max(wait.forecast_s, MIN_WAIT_S))

    def rejected(self, priority: Priority, refusal: str) -> None:
        self._refusals[priority, refusal].inc()


def export(queue: Queue[Any], readings: Readings, clock: Callable[[], float]) -> None:
    """Export the number, the prefill and the oldest wait of waiting requests, by line."""

    def by_line(value: Callable[[QueueState], float]) -> Callable[[], dict[str, float]]:
        return lambda: {line: value(state) for line, state in queue.state(clock()).items()}

    readings.labelled_gauge(
        "line",
        "kvroute_queue_requests",
        "Requests that wait in the router, by line: default, or filling (background requests: "
        "batch requests, and requests of tenants above their fair share).",
        by_line(lambda state: state.requests),
    )
    readings.labelled_gauge(
        "line",
        "kvroute_queue_prefill_seconds",
        "Predicted seconds of prefill of the requests that wait in the router.",
        by_line(lambda state: state.prefill_s),
    )
    readings.labelled_gauge(
        "line",
        "kvroute_queue_oldest_seconds",
        "Time that the oldest request in the router's queue has waited.",
        by_line(lambda state: state.oldest_s),
    )
