"""Metrics of a router's queue: what waits, for how long, and who is turned away.

Labels are lines, priorities and reasons, so the number of series is fixed.
"""

import math
from collections.abc import Callable
from itertools import product
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from kvroute.contract.priority import PRIORITIES, Priority
from kvroute.process.exposition import Readings
from kvroute.router.admission.waits import Refusal, Wait
from kvroute.router.placement.attempts import RequestObserver
from kvroute.router.queueing.queue import Queue, QueueState

WAITS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
WORTH_S = 0.1  # shorter waits say nothing about forecasts
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1.1, 1.33, 2, 4, 10)


class QueueMetrics(RequestObserver):
    """Requests that had to wait, and those that got an error in place of it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        waits = Histogram(
            "kvroute_queue_wait_seconds",
            "How long requests waited in the router while every replica had enough to do; of those "
            "that had to wait.",
            ("priority",),
            buckets=WAITS_S,
            registry=registry,
        )
        refusals = Counter(
            "kvroute_queue_refused_requests",
            "Requests that got an error in place of a replica, by the reason: forecast (they would "
            "wait longer than they may), deadline (they have), full (too many wait), no_replica "
            "(none is ready), no_seat (their session would wait too long for a seat, or did).",
            ("priority", "reason"),
            registry=registry,
        )
        self._ratio = Histogram(
            "kvroute_queue_forecast_ratio",
            "What requests waited in the router, over what was forecast when they came.",
            buckets=RATIOS,
            registry=registry,
        )
        # Every label value starts at 0: a rate needs the 0 before the first event.
        self._waits = {priority: waits.labels(priority) for priority in PRIORITIES}
        self._refusals = {
            labels: refusals.labels(*labels) for labels in product(PRIORITIES, get_args(Refusal))
        }

    def waited(self, wait: Wait) -> None:
        self._waits[wait.priority].observe(wait.waited_s)
        if WORTH_S < max(wait.forecast_s, wait.waited_s) < math.inf:
            self._ratio.observe(wait.waited_s / max(wait.forecast_s, WORTH_S))

    def turned_away(self, priority: Priority, refusal: Refusal) -> None:
        self._refusals[priority, refusal].inc()


def export(queue: Queue[Any], readings: Readings, clock: Callable[[], float]) -> None:
    """Export the requests that wait now, by line."""

    def each(value: Callable[[QueueState], float]) -> Callable[[], dict[str, float]]:
        return lambda: {line: value(state) for line, state in queue.state(clock()).items()}

    readings.gauge_of(
        "line",
        "kvroute_queue_requests",
        "Requests that wait in the router, by line: default, or filling (batch requests, and those "
        "of tenants that had more than their share; they fill what others leave).",
        each(lambda state: state.requests),
    )
    readings.gauge_of(
        "line",
        "kvroute_queue_prefill_seconds",
        "Seconds of prefill that those requests are predicted to take.",
        each(lambda state: state.prefill_s),
    )
    readings.gauge_of(
        "line",
        "kvroute_queue_oldest_seconds",
        "How long the oldest of those requests has waited.",
        each(lambda state: state.oldest_s),
    )
