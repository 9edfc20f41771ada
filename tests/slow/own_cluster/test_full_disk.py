"""A full disk costs lines of logs, and no request."""

from collections.abc import Iterator

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.own_disk import CAN_MOUNT, ON_OWN_DISK, full_disk, own_disk
from tests.support.scraping import total
from tests.support.serving import Cluster, doctor, findings, start_cluster
from tests.support.untested import needs
from tests.support.waiting import wait_until

pytestmark = [
    needs("unshare"),
    pytest.mark.skipif(not CAN_MOUNT, reason="only root can mount a disk, and not over itself"),
]

REQUESTS = 40
LINES, REQUEST_LINES = "kvroute_dropped_log_lines_total", "kvroute_request_log_dropped_lines_total"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One that has a small /tmp of its own, with its logs and its request log."""
    options = ("--engine", "simulated", "--request-log", "/tmp/requests")
    with start_cluster(*options, command=ON_OWN_DISK) as cluster:
        yield cluster


def ask(cluster: Cluster) -> int:
    """The status of the answer."""
    body = {"model": BUILTIN_MODEL, "prompt": "Hello", "max_tokens": 4}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30).status_code


def told(cluster: Cluster, name: str) -> float:
    """By the router."""
    return total(cluster, "router")[name]


def logs(cluster: Cluster) -> tuple[str, str]:
    """What the doctor says of them: the worst grade, and all findings."""
    checks = [finding for finding in findings(doctor(cluster, "--json")) if finding.name == "logs"]
    grades = {check.grade for check in checks}
    worst = next(grade for grade in ("wrong", "warning", "ok") if grade in grades)
    return worst, " ".join(check.finding for check in checks)


def test_requests_go_on_while_the_disk_is_full_and_the_doctor_names_it(cluster: Cluster) -> None:
    assert logs(cluster) == ("ok", "no process has dropped a line of its log")
    with full_disk(cluster):
        assert {ask(cluster) for _ in range(REQUESTS)} == {200}
        wait_until(lambda: told(cluster, REQUEST_LINES) > 0)
        wait_until(lambda: told(cluster, LINES) > 0)
        grade, finding = logs(cluster)
        assert grade == "wrong"
        assert " 0.0 MB are free for /tmp/" in finding
    dropped = told(cluster, REQUEST_LINES)
    assert {ask(cluster) for _ in range(REQUESTS)} == {200}
    (written,) = (own_disk(cluster) / "requests").glob("*.jsonl")
    wait_until(lambda: len(written.read_bytes().splitlines()) >= REQUESTS)
    assert told(cluster, REQUEST_LINES) == dropped
    assert logs(cluster)[0] == "warning", "some lines are missing"
