"""Doctor and metrics show whether sessions wait for seats, for how long and why."""

from typing import Any

from prometheus_client import CollectorRegistry

from kvroute.features.seats.router_seats import RouterSeats, as_json
from kvroute.features.seats.seat_checks import seated, seats
from kvroute.process.exposition import Readings
from tests.features.seats.seated_sessions import Sessions


def report(sessions: Sessions) -> dict[str, Any]:
    return {"model": "m", **as_json(sessions.seats.state(sessions.now_s))}


def thrashing() -> Sessions:
    """Return seats that two sessions hold while a third one waits, because the cache is full."""
    sessions = Sessions()
    for session in (1, 2, 3):
        sessions.begin(session, 300)
    sessions.thrash()
    assert [sessions.ask(session, 400) for session in (1, 2, 3)] == [True, True, False]
    sessions.now_s += 40
    return sessions


def test_the_doctor_warns_while_sessions_wait_and_gives_the_reason() -> None:
    (check,) = seats([report(thrashing())])
    assert (check.name, check.grade) == ("seats", "warning")
    assert check.finding == (
        "2 of 3 sessions for m with a seat, since the contexts of active sessions have 1,200 "
        "tokens, and the caches hold 900; 1 request waiting for a seat, the oldest for 40 s"
    )
    assert "add replicas" in check.remedy
    assert "--max-sessions off" in check.remedy


def test_where_the_number_of_seats_is_fixed_the_remedy_is_a_larger_number() -> None:
    (check,) = seats([report(thrashing()) | {"most": 2}])
    assert "since --max-sessions is 2" in check.finding
    assert check.remedy.startswith("raise --max-sessions")


def test_without_waiting_sessions_the_check_is_ok() -> None:
    (check,) = seats([report(Sessions())])
    assert (check.grade, check.finding) == (
        "ok",
        "m had 0 conversations (single requests included) in the last minute; none needs a seat",
    )
    (check,) = seats([report(Sessions(most=7))])
    assert check.grade == "ok"
    assert "--max-sessions is 7; 0 requests waiting" in check.finding


def test_requests_that_wait_in_other_routers_count() -> None:
    here, there = thrashing(), Sessions()
    there.seats.receive("here", here.seats.report(here.now_s), 100.0)
    there.now_s = 105.0
    assert report(there)["all_routers"] == {"waiting": 1, "oldest_s": 45.0}
    assert "1 request waiting for a seat, the oldest for 45 s" in seated(report(there))


def test_metrics_have_the_seats_and_the_waits_for_them() -> None:
    registry, sessions = CollectorRegistry(), thrashing()
    feature = RouterSeats()
    feature.seats = sessions.seats
    feature.metrics(registry, Readings(registry))
    feature.line.record_wait(20.0)
    values = {
        name: registry.get_sample_value(f"kvroute_{name}")
        for name in ("seats_held", "seats_limited", "sessions_waiting", "seat_wait_seconds_sum")
    }
    assert values == {
        "seats_held": 2.0,
        "seats_limited": 1.0,
        "sessions_waiting": 1.0,
        "seat_wait_seconds_sum": 20.0,
    }
