"""Checks that the metrics of each process can be read, and that it can write its log."""

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
from kvroute.doctor.clocks import dated
from kvroute.process.clock_offset import Offset

MAX_PARALLEL = 32  # maximum number of processes whose metrics are read in parallel
CONNECT_S = 1.0  # timeout of a connection to a process
ANSWER_S = 5.0  # timeout of a process's response; long, because a busy process responds late
ASKS_FOR_TOKEN = "it needs the metrics token, which was not sent, or was wrong"
MIN_FREE_BYTES = 50_000_000  # minimum free disk space; Ray starts a new log file after 100 MB


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one request for a process's metrics."""

    process: str  # "replica ID" or "router ID"
    address: str
    problem: str = ""  # why the request failed; empty if it succeeded
    clock: Offset | None = None  # offset of the process's clock to this computer's
    dropped_lines: int = 0  # log lines that the process could not write
    log: str = ""  # path of the log's folder; empty if unknown
    free_bytes: int = 0  # free bytes on the log's disk
    model: str = ""  # name of the model; empty if the process has no model label
    cache: CacheReading | None = None  # cache counters of a replica; None for a router


def probes(targets: Sequence[dict[str, Any]], headers: Mapping[str, str]) -> list[Probe]:
    """Read the metrics of all processes, MAX_PARALLEL of them at a time.

    Args:
        targets: The response of GET /v1/metrics/targets.
        headers: Headers of each request.
    """
    with ThreadPoolExecutor(MAX_PARALLEL) as pool:
        return list(pool.map(partial(_probe, headers), targets))


def judge(probes: Sequence[Probe]) -> Iterator[Check]:
    """Check that the metrics of all processes can be read."""
    locked = [probe for probe in probes if probe.problem == ASKS_FOR_TOKEN]
    silent = [probe for probe in probes if probe.problem and probe not in locked]
    if not probes:
        yield Check("ports", "ok", "no process serves metrics (--no-metrics)")
    elif not silent and not locked:
        yield Check("ports", "ok", f"the metrics of {len(probes)} processes can be read from here")
    if locked:
        finding = (
            f"{len(locked)} of {len(probes)} processes need a token, such as {locked[0].process}"
        )
        remedy = f"set {TOKEN_FILE} to the file of --metrics-token-file"
        yield Check("ports", "warning", finding, remedy)
    if probes and len(silent) == len(probes):
        finding = (
            f"none of {len(probes)} metrics ports can be reached from here: {silent[0].problem}"
        )
        remedy = "run the doctor on a machine of the cluster; Prometheus must reach the ports too"
        yield Check("ports", "warning", finding, remedy)
    else:
        for probe in silent:
            finding = f"{probe.process} at {probe.address}: {probe.problem}"
            yield Check("ports", "wrong", finding, "open all ports between the nodes")


def judge_missing(replicas: Iterable[str], targets: Sequence[dict[str, Any]]) -> Iterator[Check]:
    """Check that all replicas in the index serve metrics, if any process serves metrics."""
    exposed = {target["labels"].get("replica") for target in targets}
    indexed = replicas_of(replicas)
    missing = sorted(indexed - exposed)
    if targets and missing:
        finding = f"{len(missing)} of {len(indexed)} replicas have no metrics, such as {missing[0]}"
        remedy = "see their logs for the reason; perhaps --metrics-port-range has too few ports"
        yield Check("ports", "warning", finding, remedy)


def judge_logs(probes: Sequence[Probe]) -> Iterator[Check]:
    """Check that the processes can write their logs."""
    full = [probe for probe in probes if probe.log and probe.free_bytes < MIN_FREE_BYTES]
    for probe in full:
        finding = (
            f"{probe.free_bytes / 1e6:.1f} MB are free for {probe.log} of {probe.process}, which "
            f"has dropped {probe.dropped_lines} lines"
        )
        yield Check(
            "logs", "wrong", finding, "free some space on that disk; nothing else is affected"
        )
    for probe in probes:
        if probe.dropped_lines and probe not in full:
            finding = f"{probe.process} has dropped {probe.dropped_lines} lines of {probe.log}"
            yield Check("logs", "warning", finding, "nothing to do, unless it happens again")
    if not full and not any(probe.dropped_lines for probe in probes):
        yield Check("logs", "ok", "no process has dropped a line of its log")


def caches(probes: Sequence[Probe]) -> dict[str, list[CacheReading]]:
    """Return the cache counters of each model's replicas."""
    by_model = dict[str, list[CacheReading]]()
    for probe in probes:
        if probe.cache:
            by_model.setdefault(probe.model, []).append(probe.cache)
    return by_model


def _probe(headers: Mapping[str, str], target: dict[str, Any]) -> Probe:
    (address,), labels = target["targets"], target["labels"]
    process, sent_s = f"{labels['role']} {labels[labels['role']]}", time.time()
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    try:
        response = httpx.get(
            f"http://{address}/metrics", headers=headers, timeout=timeout, trust_env=False
        )
        if response.status_code == 401:
            return Probe(process, address, ASKS_FOR_TOKEN)
        response.raise_for_status()
    except httpx.HTTPError as error:
        return Probe(process, address, str(error) or type(error).__name__)
    clock = dated(response.headers.get("date"), sent_s=sent_s, received_s=time.time())
    families = text_string_to_metric_families(response.text)
    samples = [sample for family in families for sample in family.samples]
    model, cache = labels.get("model", ""), reading(samples)
    return Probe(process, address, clock=clock, model=model, cache=cache, **_log_health(samples))


def _log_health(samples: Iterable[Sample]) -> dict[str, Any]:
    """Return the fields of a Probe about its log, from the metrics of kvroute.process.logs."""
    by_name = {sample.name: sample for sample in samples}
    fields: dict[str, Any] = {}
    if dropped := by_name.get("kvroute_dropped_log_lines_total"):
        fields["dropped_lines"] = int(dropped.value)
    if free := by_name.get("kvroute_log_disk_free_bytes"):
        fields |= {"free_bytes": int(free.value), "log": free.labels["path"]}
    return fields
