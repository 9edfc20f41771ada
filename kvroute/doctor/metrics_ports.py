"""Checks of every process by its metrics: whether they can be read, as Prometheus must too, and
whether its log can be written."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvroute.client import TOKEN_FILE
from kvroute.contract.ranks import replicas_of
from kvroute.doctor.cache_size import CacheReading, reading
from kvroute.doctor.checks import Check
from kvroute.doctor.clocks import Offset, dated

AT_ONCE = 32
CONNECT_S = 1.0
ANSWER_S = 5.0  # long, since a busy process is reachable
ASKS_FOR_TOKEN = "it asks for the token of metrics, or for another one"
LITTLE_BYTES = 50_000_000  # of free space for logs: Ray rotates files of 100 MB


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one request for a process's metrics."""

    who: str  # "replica ID" or "router ID"
    address: str
    trouble: str = ""  # empty: it answered
    clock: Offset | None = None  # to this computer's
    dropped_lines: int = 0  # of its log
    log: str = ""  # the path; empty: unknown
    free_bytes: int = 0  # on the log's disk
    model: str = ""
    cache: CacheReading | None = None  # None: it is a router


def probes(targets: Sequence[dict[str, Any]], headers: Mapping[str, str]) -> list[Probe]:
    """Reads all targets, AT_ONCE at a time. targets: the response of GET /v1/metrics/targets;
    headers: those of each request."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(partial(_probe, headers), targets))


def judge(found: Sequence[Probe]) -> Iterator[Check]:
    asking = [probe for probe in found if probe.trouble == ASKS_FOR_TOKEN]
    silent = [probe for probe in found if probe.trouble and probe not in asking]
    if not found:
        yield Check("ports", "ok", "no process has metrics (--no-metrics)")
    elif not silent and not asking:
        yield Check("ports", "ok", f"the metrics of {len(found)} processes can be read from here")
    if asking:
        finding = f"{len(asking)} of {len(found)} processes ask for a token: {asking[0].who}"
        remedy = f"write the file of --metrics-token-file into {TOKEN_FILE}"
        yield Check("ports", "warning", finding, remedy)
    if found and len(silent) == len(found):
        finding = (
            f"none of {len(found)} metrics ports can be reached from here: {silent[0].trouble}"
        )
        remedy = "ask from a machine of the cluster; Prometheus must reach them too"
        yield Check("ports", "warning", finding, remedy)
    else:
        for probe in silent:
            finding = f"{probe.who} at {probe.address}: {probe.trouble}"
            yield Check("ports", "wrong", finding, "let nodes reach all of each other's ports")


def judge_missing(replicas: Iterable[str], targets: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Whether some replicas of the index have no metrics, though other processes have."""
    exposed = {target["labels"].get("replica") for target in targets}
    known = replicas_of(replicas)
    missing = sorted(known - exposed)
    if targets and missing:
        finding = f"{len(missing)} of {len(known)} replicas have no metrics: {missing[0]}"
        remedy = "their logs say why; perhaps --metrics-port-range has too few ports"
        yield Check("ports", "warning", finding, remedy)


def judge_logs(found: Sequence[Probe]) -> Iterator[Check]:
    """Whether the processes can write their logs."""
    full = [probe for probe in found if probe.log and probe.free_bytes < LITTLE_BYTES]
    for probe in full:
        finding = (
            f"{probe.free_bytes / 1e6:.1f} MB are free for {probe.log} of {probe.who}, which has "
            f"dropped {probe.dropped_lines} lines"
        )
        yield Check("logs", "wrong", finding, "free some space there; nothing else is affected")
    for probe in found:
        if probe.dropped_lines and probe not in full:
            finding = f"{probe.who} has dropped {probe.dropped_lines} lines of {probe.log}"
            yield Check("logs", "warning", finding, "nothing, unless it happens again")
    if not full and not any(probe.dropped_lines for probe in found):
        yield Check("logs", "ok", "no process has dropped a line of its log")


def caches(found: Sequence[Probe]) -> dict[str, list[CacheReading]]:
    """What the replicas of each model have counted."""
    by_model = dict[str, list[CacheReading]]()
    for probe in found:
        if probe.cache:
            by_model.setdefault(probe.model, []).append(probe.cache)
    return by_model


def _probe(headers: Mapping[str, str], target: dict[str, Any]) -> Probe:
    (address,), labels = target["targets"], target["labels"]
    who, sent_s = f"{labels['role']} {labels[labels['role']]}", time.time()
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    try:
        answer = httpx.get(
            f"http://{address}/metrics", headers=headers, timeout=timeout, trust_env=False
        )
        if answer.status_code == 401:
            return Probe(who, address, ASKS_FOR_TOKEN)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        return Probe(who, address, str(error) or type(error).__name__)
    clock = dated(answer.headers.get("date"), sent_s=sent_s, received_s=time.time())
    families = text_string_to_metric_families(answer.text)
    told = [sample for family in families for sample in family.samples]
    model, cache = labels.get("model", ""), reading(told)
    return Probe(who, address, clock=clock, model=model, cache=cache, **_log_health(told))


def _log_health(told: Iterable[Sample]) -> dict[str, Any]:
    """Of a process's metrics, what `logs.py` exports."""
    samples = {sample.name: sample for sample in told}
    found: dict[str, Any] = {}
    if dropped := samples.get("kvroute_dropped_log_lines_total"):
        found["dropped_lines"] = int(dropped.value)
    if free := samples.get("kvroute_log_disk_free_bytes"):
        found |= {"free_bytes": int(free.value), "log": free.labels["path"]}
    return found
