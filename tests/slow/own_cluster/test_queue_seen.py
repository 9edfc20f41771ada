"""What waits in a cluster with more work than it can do is told wherever one looks."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.browser import page
from tests.support.crowd import crowd
from tests.support.scraping import total
from tests.support.serving import Cluster, doctor, findings, start_cluster
from tests.support.untested import needs
from tests.support.waiting import wait_until

LONG = 3000  # tokens; the replica computes 2,000 a second
REQUESTS = 12
CROWD = 6  # clients
QUEUED = (
    "[...document.querySelectorAll('#figures > div')]"
    ".find((one) => one.textContent.startsWith('Queued'))?.textContent"
)

numbers = itertools.count(1000)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One slow replica behind one router."""
    speed = ("--simulated-prefill-tokens-per-s", "2000", "--simulated-decode-ms", "1")
    with start_cluster("--engine", "simulated", "--max-wait-s", "100", *speed) as cluster:
        yield cluster


def ask(cluster: Cluster, **more: Any) -> httpx.Response:
    """A prompt that nobody has sent before."""
    body = {"prompt": [next(numbers)] * LONG, "max_tokens": 1} | more
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)


def queue(cluster: Cluster) -> dict[str, Any]:
    (told,) = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["queues"]
    return dict(told)


def of_queue(cluster: Cluster) -> tuple[str, str]:
    (check,) = [
        finding for finding in findings(doctor(cluster, "--json")) if finding.name == "queue"
    ]
    return check.grade, check.finding


def test_what_waits_is_told_and_afterwards_that_it_did(cluster: Cluster) -> None:
    with crowd(CROWD, lambda: ask(cluster)) as answers:  # until the slow doctor has looked
        wait_until(lambda: queue(cluster)["oldest_s"] > 1)
        told = queue(cluster)
        assert told["requests"] == told["lines"]["default"]["requests"] > 0
        assert told["all_routers"]["prefill_s"] == told["prefill_s"] > 0
        assert total(cluster, "router")["kvroute_queue_requests{default}"] > 0
        assert of_queue(cluster)[0] == "warning"
    assert {answer.status_code for answer in answers} == {200}
    waits = [answer for answer in answers if float(answer.headers["x-kvroute-queued-s"])]
    seen = total(cluster, "router")
    assert seen["kvroute_queue_wait_seconds_count{default}"] == len(waits) > 0
    told = queue(cluster)
    assert (told["requests"], told["recent"]["waited"]) == (0, len(waits))
    assert f"{len(waits)} requests" in of_queue(cluster)[1]


def test_refusals_are_told_with_their_reason(cluster: Cluster) -> None:
    with ThreadPoolExecutor(REQUESTS) as clients:
        asking = [clients.submit(ask, cluster) for _ in range(REQUESTS)]
        wait_until(lambda: queue(cluster)["prefill_s"] > 5)
        assert ask(cluster, timeout=0.5).status_code == 429
        assert {each.result().status_code for each in asking} == {200}
    seen = total(cluster, "router")
    refused = {
        reason: seen[f"kvroute_queue_refused_requests_total{{default,{reason}}}"]
        for reason in ("forecast", "deadline", "full", "no_replica")
    }
    assert sum(refused.values()) == refused["forecast"] + refused["deadline"] == 1
    grade, finding = of_queue(cluster)
    assert grade == "warning"
    assert "waited too long" in finding


@needs("chromium")
def test_the_page_shows_what_is_held_back(cluster: Cluster) -> None:
    with page() as shown:
        with crowd(CROWD, lambda: ask(cluster)) as answers:
            shown.open(f"{cluster.url}/ui", width=1200)
            shown.wait_for(f"/Queued[1-9].* of prefill; here for up to/.test({QUEUED})")
        assert shown.errors == []
        assert {answer.status_code for answer in answers} == {200}
        shown.wait_for(f"/Queued0none waits/.test({QUEUED})")
