"""The queue in status, doctor, metrics and spans: waiting requests, their waits, and refusals."""

from typing import get_args

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from kvroute.command.status_command import queued
from kvroute.contract.messages import Waiting
from kvroute.doctor import load_checks
from kvroute.doctor.checks import Check
from kvroute.features import REFUSALS
from kvroute.process import tracing
from kvroute.process.tracing import Tracing
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.observability.queue_report import RecentWaits, queue_report
from kvroute.router.observability.request_spans import Dispatches
from kvroute.router.observability.rolling_window import WINDOW_S
from kvroute.router.placement.waits import QueueRefusal, Wait
from kvroute.router.queueing.queue import Queue, QueuedRequest
from tests.support.placements import anywhere

ELSEWHERE = Waiting([1, 7], [0.5, 3.0], [0.25, 8.0])


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def filled() -> Queue[None]:
    """Return a queue with two requests and a batch request, and seven in another router."""
    queue = Queue[None](lambda: 1.0)
    queue.add(QueuedRequest(None, arrived_s=100.0, prefill_s=1.0))
    queue.add(QueuedRequest(None, arrived_s=103.0, prefill_s=0.5))
    queue.add(QueuedRequest(None, arrived_s=90.0, prefill_s=2.0, is_batch=True, place=anywhere))
    queue.receive("other", ELSEWHERE, 104.0)
    return queue


# JSON.


def test_waiting_requests_are_shown_by_line_and_for_all_routers() -> None:
    assert queue_report(filled(), 104.0) == {
        "requests": 3,
        "prefill_s": 3.5,
        "oldest_s": 14.0,
        "lines": {
            "default": {"requests": 2, "prefill_s": 1.5, "oldest_s": 4.0},
            "filling": {"requests": 1, "prefill_s": 2.0, "oldest_s": 14.0},
        },
        "all_routers": {"requests": 10, "prefill_s": 11.5},
    }


def test_waiting_requests_of_a_lost_router_do_not_count() -> None:
    queue = filled()
    queue.forget("other")
    assert queue_report(queue, 104.0)["all_routers"] == {"requests": 3, "prefill_s": 3.5}


def test_waits_and_refusals_are_counted_for_some_minutes() -> None:
    clock = Clock()
    recent = RecentWaits(clock)
    recent.waited(Wait("interactive", "busy", 1.0))
    clock.now_s += WINDOW_S / 2
    recent.waited(Wait("default", "order", 4.0))
    recent.waited(Wait("batch", "busy", 60.0))
    recent.rejected("default", "deadline")
    assert recent.as_json() == {
        "window_s": WINDOW_S,
        "waited": 2,
        "mean_s": 2.5,
        "longest_s": 4.0,
        "refused": {"deadline": 1},
    }
    clock.now_s += WINDOW_S / 2
    assert recent.as_json()["waited"] == 1
    clock.now_s += WINDOW_S / 2
    assert recent.as_json() == RecentWaits().as_json()


# Metrics and spans.


def test_metrics_have_waits_refusals_and_the_accuracy_of_forecasts() -> None:
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    metrics.export_queue(filled())

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"kvroute_queue_{name}", labels)

    metrics.waited(Wait("interactive", "busy", 3.0, forecast_s=2.0))
    metrics.waited(Wait("default", "busy", 3.0, forecast_s=float("inf")))
    metrics.rejected("batch", "forecast")
    assert value("wait_seconds_sum", priority="interactive") == 3.0
    assert value("wait_seconds_count", priority="batch") == 0
    assert value("forecast_ratio_count") == 1
    assert value("forecast_ratio_sum") == 1.5
    assert value("refused_requests_total", priority="batch", reason="forecast") == 1
    assert value("refused_requests_total", priority="default", reason="deadline") == 0
    assert value("requests", line="default") == 2
    assert value("prefill_seconds", line="filling") == 2.0
    assert (value("oldest_seconds", line="default") or 0) > 0


def test_the_wait_has_its_own_span(monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_exporter", lambda: exporter)
    traces = Tracing("kvroute-test", "1")
    Dispatches(traces).waited(Wait("batch", "busy", 2.5, forecast_s=2.0))
    traces._provider.force_flush()
    (span,) = exporter.get_finished_spans()
    traces._provider.shutdown()
    assert span.name == "queue"
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.5, abs=0.1)
    assert dict(span.attributes or {}) == {
        "kvroute.priority": "batch",
        "kvroute.queued_for": "busy",
        "kvroute.forecast_s": 2.0,
    }


# The doctor.


def judged(queue: Queue[None], *, at_s: float, recent: RecentWaits | None = None) -> list[Check]:
    report = queue_report(queue, at_s)
    recent = recent or RecentWaits()
    return [*load_checks.queues([{"model": "m", **report, "recent": recent.as_json()}])]


def test_long_waiting_requests_are_a_warning_with_a_remedy() -> None:
    (check,) = judged(filled(), at_s=104.0)
    assert (check.name, check.grade) == ("queue", "warning")
    assert check.finding == (
        "2 requests for m in the queue, since every replica is busy: 2 s of prefill, the oldest "
        "for 4 s; 10 requests in the queues of all routers"
    )
    assert "--max-replicas" in check.remedy


def test_short_waits_and_waiting_batch_requests_are_ok() -> None:
    queue = Queue[None](lambda: 1.0)
    queue.add(QueuedRequest(None, arrived_s=0.0, prefill_s=1.0, is_batch=True, place=anywhere))
    queue.add(QueuedRequest(None, arrived_s=59.5, prefill_s=1.0))
    (check,) = judged(queue, at_s=60.0)
    assert check.grade == "ok"
    assert check.finding == "no request for m had to wait for a replica in 5 minutes"


@pytest.mark.parametrize(("longest_s", "grade"), [(2.0, "ok"), (20.0, "warning")])
def test_long_waits_of_the_last_minutes_are_a_warning(longest_s: float, grade: str) -> None:
    recent = RecentWaits()
    for waited_s in (1.0, longest_s):
        recent.waited(Wait("interactive", "busy", waited_s))
    recent.waited(Wait("batch", "busy", 300.0))
    (check,) = judged(Queue(lambda: 1.0), at_s=0.0, recent=recent)
    assert check.grade == grade
    assert check.finding == (
        "2 requests for m had to wait for a replica in 5 minutes: "
        f"{(1 + longest_s) / 2} s on average, {longest_s} s at most"
    )


def test_refused_requests_are_a_warning_with_reasons() -> None:
    recent = RecentWaits()
    for _ in range(3):
        recent.rejected("default", "forecast")
    recent.rejected("interactive", "deadline")
    recent.rejected("batch", "deadline")  # the request had its own wait limit
    (check,) = judged(Queue(lambda: 1.0), at_s=0.0, recent=recent)
    assert check.grade == "warning"
    assert check.finding == (
        "4 requests for m refused in 5 minutes: 3 would have waited too long, 1 had waited too long"
    )
    assert "--max-wait-s" in check.remedy


def test_the_doctor_explains_every_reason_of_a_refusal() -> None:
    assert load_checks.REFUSALS.keys() == {*get_args(QueueRefusal), *REFUSALS}


# `kvroute status`.


def test_status_shows_waiting_requests_if_there_are_any() -> None:
    def status_text(queue: Queue[None]) -> str:
        report = {"model": "m", **queue_report(queue, 104.0)}
        return queued(report)

    assert status_text(Queue(lambda: 1.0)) == "no request waits for a replica"
    assert status_text(filled()) == (
        "10 requests wait for a replica, with 11.5 s of prefill; 3 of them at the router that "
        "answered, the oldest for 14.0 s"
    )
