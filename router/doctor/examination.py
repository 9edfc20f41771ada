"""Asks a running cluster one thing after another, and has each answer judged."""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpx

from router.command.client import refusal
from router.doctor import checks, clocks, ports, work
from router.doctor.checks import Check
from router.doctor.clocks import Offset

WAIT_S = 60.0  # for an answer; canaries and audits ask every replica

Step = Callable[[str], object]  # hears what is done now


def examine(url: str, *, audit: bool, step: Step = lambda text: None) -> Iterator[Check]:
    """One check after another, as far as the cluster answers."""
    try:
        health = httpx.get(f"{url.rstrip('/')}/health", timeout=WAIT_S).json()
        ready = int(health["replicas"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        finding = f"no kvroute answers at {url} ({error})"
        remedy = "start one (kvroute serve), or write another --url"
        yield Check("cluster", "wrong", finding, remedy)
        return
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        yield checks.cluster(health)
        yield from checks.handshake(health)
        yield from _Examination(client, step).run(has_replicas=ready > 0, audit=audit)


class _RefusedError(Exception):
    """The cluster said that it cannot say; the message has its words."""


class _Examination:
    def __init__(self, client: httpx.Client, step: Step) -> None:
        self._client = client
        self._step = step

    def run(self, *, has_replicas: bool, audit: bool) -> Iterator[Check]:
        yield from self._attempt("diagnosis", "asking a router what it sees", self._diagnosis)
        if has_replicas:
            yield from self._attempt("canary", "sending each replica a canary", self._canary)
            if audit:
                yield from self._attempt("audit", "comparing all accounts of blocks", self._audit)

    def _attempt(
        self, name: str, doing: str, part: Callable[[], Iterable[Check]]
    ) -> Iterable[Check]:
        """Its checks, or one that says why there are none."""
        self._step(doing)
        try:
            return list(part())
        except _RefusedError as error:
            return [Check(name, "wrong", str(error), "see to that, and ask again")]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            finding = f"the answer cannot be had or read: {error!r}"
            return [Check(name, "wrong", finding, "see the router's log; is it another version?")]

    def _ask(self, method: str, path: str) -> Any:
        answer = self._client.request(method, path)
        found = answer.json()
        if answer.is_error:
            raise _RefusedError(refusal(found) or f"{method} {path}: {answer.status_code}")
        return found

    def _diagnosis(self) -> Iterator[Check]:
        sent_s = time.time()
        found = self._ask("GET", "/v1/cluster/diagnosis")
        router = clocks.offset(found["now_s"], sent_s=sent_s, received_s=time.time())
        replicas, ours = found["replicas"], importlib.metadata.version("kvroute")
        yield from checks.deployments(found["serve"]["deployments"])
        yield from checks.redis(found["redis"])
        yield from checks.leases(replicas["running"], replicas["leases_s"])
        yield from work.hits(found["hits"])
        yield from work.load(replicas["backlogs_s"])
        yield checks.haproxy(found["serve"])
        yield checks.versions(found["versions"], ours, found["nodes"])
        yield from self._processes(router, found["redis"])

    def _processes(self, router: Offset, redis: checks.Facts) -> Iterator[Check]:
        self._step("asking each process for its metrics")
        probes = list[ports.Probe]()
        try:
            probes = ports.probes(self._ask("GET", "/v1/metrics/targets"))
            yield from ports.judge(probes)
        except _RefusedError as error:
            yield Check("ports", "warning", f"not known: {error}", "see to that, and ask again")
        each = {probe.who: probe.clock for probe in probes if probe.clock}
        ahead = Offset(*redis["clock_ahead_s"]) if "clock_ahead_s" in redis else None
        yield from clocks.judge(router, ahead, each)

    def _canary(self) -> Iterator[Check]:
        found = self._ask("POST", "/v1/cluster/canary")
        return checks.canary(found["replicas"], found["router"])

    def _audit(self) -> Iterator[Check]:
        found = self._ask("GET", "/v1/cluster/audit")
        return (checks.audit(replica, found["router"]) for replica in found["replicas"])
