"""Metrics of seats: how many sessions are active, hold a seat or wait for one.

A seat is the permission of a session to send requests (seats.py).
"""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Histogram

from kvroute.features.seats.seats import Seats
from kvroute.process.exposition import Readings

# Upper bounds of the histogram's buckets, in seconds.
WAITS_S = (1, 5, 15, 30, 60, 120, 180, 300, 450, 600, 1200)


def waits(registry: CollectorRegistry) -> Histogram:
    """Return the histogram of waits. Requests that did not wait do not count."""
    return Histogram(
        "kvroute_seat_wait_seconds",
        "Time that requests waited in the router until their session had a seat. Requests that "
        "did not have to wait are not counted.",
        buckets=WAITS_S,
        registry=registry,
    )


def export(seats: Seats[Any], readings: Readings, clock: Callable[[], float]) -> None:
    """Export the current numbers of sessions and seats."""
    readings.gauge(
        "kvroute_sessions_active",
        "Sessions of all routers with a running request, or with a request in the last minute.",
        lambda: seats.state(clock()).sessions,
    )
    readings.gauge(
        "kvroute_seats_held",
        "Sessions of all routers that hold a seat. A session does not need one for its first "
        "prompt.",
        lambda: seats.state(clock()).seats,
    )
    readings.gauge(
        "kvroute_seats_limited",
        "1 while sessions need a seat to send requests, else 0.",
        lambda: seats.state(clock()).is_limited,
    )
    readings.gauge(
        "kvroute_sessions_waiting",
        "Requests that wait in the router until their session has a seat.",
        lambda: seats.state(clock()).waiting,
    )
    readings.gauge(
        "kvroute_seat_oldest_seconds",
        "Time that the oldest request has waited for a seat.",
        lambda: seats.state(clock()).oldest_s,
    )
