"""Queries a running cluster step by step, and turns each response into checks."""

import importlib.metadata
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import httpx

from kvroute.client import error_code, error_message, key_headers, metrics_headers
from kvroute.doctor import (
    cache_size,
    checks,
    clocks,
    fleet_checks,
    load_checks,
    metrics_ports,
    wire_checks,
)
from kvroute.doctor.checks import Check
from kvroute.features import FEATURES
from kvroute.features.feature import DoctorRequest
from kvroute.local.running import URL
from kvroute.process.clock_offset import Offset, offset

WAIT_S = 60.0  # timeout of a request; long, since a request can involve every replica

Step = Callable[[str], object]  # called with a description of each step, for the terminal


def collect_checks(
    url: str, further: Iterable[DoctorRequest] = (), step: Step = lambda text: None
) -> Iterator[Check]:
    """Query the cluster and yield the checks in order; if it does not respond, yield only one."""
    try:
        response = httpx.get(f"{url}/health", timeout=WAIT_S)
        health = response.json()
        ready = int(health["replicas"])
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        yield _no_cluster(url, str(error))
        return
    except (ValueError, KeyError, TypeError):
        seen = f"the response to GET /health is {response.status_code} {response.reason_phrase}"
        yield _no_cluster(url, f"{seen}, without the state of a cluster")
        return
    with httpx.Client(base_url=url, timeout=WAIT_S, headers=key_headers()) as client:
        yield fleet_checks.cluster(health)
        yield from fleet_checks.connections(health)
        yield from fleet_checks.handshake(health)
        yield from _Collection(client, step).run(further if ready > 0 else ())


def _no_cluster(url: str, reason: str) -> Check:
    remedy = f"start a cluster (kvroute serve), or name another with --url or {URL}"
    return Check("cluster", "wrong", f"no kvroute answers at {url} ({reason})", remedy)


class _RefusedError(Exception):
    """The cluster has responded with an error; the exception has its message."""


class _ForbiddenError(_RefusedError):
    """The user's API key lacks the necessary role."""


class _StoppingError(_RefusedError):
    """The cluster is stopping."""


class _Collection:
    """The queries that need the user's API key, and their checks."""

    def __init__(self, client: httpx.Client, step: Step) -> None:
        self._client = client
        self._step = step
        self._refusals = set[str]()  # messages that were reported already

    def run(self, further: Iterable[DoctorRequest]) -> Iterator[Check]:
        yield from self._attempt("diagnosis", "querying a router's diagnosis", self._diagnosis)
        for each in further:
            yield from self._attempt(each.name, each.step, partial(self._further, each))

    def _attempt(
        self, name: str, step: str, part: Callable[[], Iterable[Check]]
    ) -> Iterable[Check]:
        """Return the checks of one part, or a check that reports the error of the part."""
        self._step(step)
        try:
            return list(part())
        except _ForbiddenError as error:
            return [Check(name, "warning", f"not checked: {error}", "use another API key")]
        except _RefusedError as error:
            if str(error) in self._refusals:  # an earlier part has reported it
                return []
            self._refusals.add(str(error))
            if isinstance(error, _StoppingError):
                remedy = "wait until it has stopped, then start it again"
                return [Check("cluster", "wrong", "the cluster is stopping", remedy)]
            return [Check(name, "wrong", str(error), "correct this, then run the doctor again")]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            finding = f"the response did not arrive or cannot be read: {error!r}"
            remedy = "see the router's log; does it run this command's version of kvroute?"
            return [Check(name, "wrong", finding, remedy)]

    def _request(self, method: str, path: str) -> Any:
        response = self._client.request(method, path)
        body = response.json()
        if response.is_error:
            refused = _ForbiddenError if response.status_code == 403 else _RefusedError
            if error_code(body) == "stopping":
                refused = _StoppingError
            raise refused(error_message(body) or f"{method} {path}: {response.status_code}")
        return body

    def _diagnosis(self) -> Iterator[Check]:
        sent_s = time.time()
        diagnosis = self._request("GET", "/v1/cluster/diagnosis")
        router = offset(diagnosis["now_s"], sent_s=sent_s, received_s=time.time())
        replicas, ours = diagnosis["replicas"], importlib.metadata.version("kvroute")
        lost = diagnosis.get("servers", {})
        yield from fleet_checks.servers(lost)
        if serve := diagnosis["serve"]:  # not under kvroute attach
            yield from fleet_checks.deployments(serve["deployments"], lost_servers=len(lost))
        yield from checks.redis(diagnosis["redis"])
        yield from checks.leases(replicas["running"], replicas["leases_s"])
        yield from checks.clusters(diagnosis["clusters"])
        yield from checks.records(diagnosis["unreadable"])
        yield checks.rendering(replicas.get("rendering_differences", {}))
        yield from checks.hooks(replicas.get("unfit", {}))
        yield from checks.cache_events(replicas.get("guessed_caches", ()))
        yield checks.blamed(diagnosis.get("blamed", ()))
        yield from load_checks.hits(diagnosis["hits"])
        yield from load_checks.load(replicas["backlogs_s"])
        yield from load_checks.speeds(replicas.get("slow", {}))
        yield from load_checks.queues(diagnosis.get("queues", ()))
        for feature in FEATURES:
            yield from feature.checks(diagnosis.get(feature.name))
        if serve:
            yield checks.haproxy(serve)
        yield checks.access(diagnosis["access"])
        yield from wire_checks.encryption(replicas.get("wire", {}), diagnosis["nodes"])
        yield checks.versions(diagnosis["versions"], ours, diagnosis["nodes"])
        yield from self._processes(router, diagnosis)

    def _processes(self, router: Offset, diagnosis: checks.Facts) -> Iterator[Check]:
        replicas, redis = diagnosis["replicas"], diagnosis["redis"]
        self._step("reading each process's metrics")
        probes = list[metrics_ports.Probe]()
        try:
            targets = self._request("GET", "/v1/metrics/targets")
            probes = metrics_ports.probes(targets, metrics_headers())
            yield from metrics_ports.judge(probes)
            yield from metrics_ports.judge_missing(replicas["leases_s"] or (), targets)
            yield from metrics_ports.judge_logs(probes)
            is_busy = load_checks.is_busy(replicas["backlogs_s"], diagnosis.get("queues", ()))
            by_model = metrics_ports.caches(probes)
            yield from cache_size.judge_disk(diagnosis["hits"], [*chain(*by_model.values())])
            for model, caches in by_model.items():
                yield from cache_size.judge(model, diagnosis["hits"], caches, is_busy=is_busy)
        except _RefusedError as error:
            yield Check(
                "ports",
                "warning",
                f"not checked: {error}",
                "correct this, then run the doctor again",
            )
        processes = {probe.process: probe.clock for probe in probes if probe.clock}
        redis_clock = Offset(*redis["clock_ahead_s"]) if "clock_ahead_s" in redis else None
        yield from clocks.judge(router, redis_clock, processes)

    def _further(self, request: DoctorRequest) -> Iterable[Check]:
        return request.checks(self._request(request.method, request.path))
