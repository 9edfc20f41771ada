"""A check whether the metrics of every process can be read; Prometheus needs the same access."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from kvroute.doctor.checks import Check
from kvroute.doctor.clocks import Offset, dated

AT_ONCE = 32
CONNECT_S = 1.0
ANSWER_S = 5.0  # long, since a busy process is reachable


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one request for a process's metrics."""

    who: str  # "replica ID" or "router ID"
    address: str
    trouble: str = ""  # empty: it answered
    clock: Offset | None = None  # to this computer's


def probes(targets: Sequence[dict[str, Any]]) -> list[Probe]:
    """Reads all targets, AT_ONCE at a time. targets: the response of GET /v1/metrics/targets."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(_probe, targets))


def judge(found: Sequence[Probe]) -> Iterator[Check]:
    silent = [probe for probe in found if probe.trouble]
    if not found:
        yield Check("ports", "ok", "no process has metrics (--no-metrics)")
    elif not silent:
        yield Check("ports", "ok", f"the metrics of {len(found)} processes can be read from here")
    elif len(silent) == len(found):
        finding = (
            f"none of {len(found)} metrics ports can be reached from here: {silent[0].trouble}"
        )
        remedy = "ask from a machine of the cluster; Prometheus must reach them too"
        yield Check("ports", "warning", finding, remedy)
    else:
        for probe in silent:
            finding = f"{probe.who} at {probe.address}: {probe.trouble}"
            yield Check("ports", "wrong", finding, "let nodes reach all of each other's ports")


def _probe(target: dict[str, Any]) -> Probe:
    (address,), labels = target["targets"], target["labels"]
    who, sent_s = f"{labels['role']} {labels[labels['role']]}", time.time()
    timeout = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    try:
        answer = httpx.get(f"http://{address}/metrics", timeout=timeout, trust_env=False)
        answer.raise_for_status()
    except httpx.HTTPError as error:
        return Probe(who, address, str(error) or type(error).__name__)
    clock = dated(answer.headers.get("date"), sent_s=sent_s, received_s=time.time())
    return Probe(who, address, clock=clock)
