"""Metrics of sessions' seats: how many sessions are active, hold a seat or wait for one."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from kvroute.process.exposition import Readings
from kvroute.router.admission.seats import Seats
from kvroute.router.placement.attempts import RequestObserver

WAITS_S = (1, 5, 15, 30, 60, 120, 180, 300, 450, 600, 1200)


class SeatMetrics(RequestObserver):
    """How long requests waited for a seat, of those that had to wait and got one."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._waits = Histogram(
            "kvroute_seat_wait_seconds",
            "How long requests waited in the router until their session had a seat; of those that "
            "had to wait.",
            buckets=WAITS_S,
            registry=registry,
        )

    def seated(self, waited_s: float) -> None:
        self._waits.observe(waited_s)


def export(seats: Seats[Any], readings: Readings, clock: Callable[[], float]) -> None:
    """Export the sessions and seats of now."""
    readings.gauge(
        "kvroute_sessions_active",
        "Sessions of all routers that have sent a request in the last minute, or have one running.",
        lambda: seats.state(clock()).sessions,
    )
    readings.gauge(
        "kvroute_seats_held",
        "Sessions of all routers that hold a seat. Those of a first prompt hold none.",
        lambda: seats.state(clock()).seats,
    )
    readings.gauge(
        "kvroute_seats_limited",
        "1 while sessions need a seat to send, else 0.",
        lambda: seats.state(clock()).is_limited,
    )
    readings.gauge(
        "kvroute_sessions_waiting",
        "Requests that wait in the router until their session has a seat.",
        lambda: seats.state(clock()).waiting,
    )
    readings.gauge(
        "kvroute_seat_oldest_seconds",
        "How long the first of those requests has waited.",
        lambda: seats.state(clock()).oldest_s,
    )
