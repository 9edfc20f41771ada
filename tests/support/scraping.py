"""Reads the metrics of a cluster's processes without a Prometheus."""

from collections import Counter

import requests
from prometheus_client.parser import text_string_to_metric_families

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.placement.ledger import CAUSES
from tests.support.serving import Cluster


def targets(cluster: Cluster, role: str) -> dict[str, str]:
    """Return the metrics addresses of the processes with this role: id -> address.

    Raises:
        requests.HTTPError: The request to the router failed.
    """
    response = requests.get(f"{cluster.url}/v1/metrics/targets", timeout=120)
    response.raise_for_status()
    chosen = [target for target in response.json() if target["labels"]["role"] == role]
    assert all(target["labels"].keys() == {"model", "role", role, "node"} for target in chosen)
    assert all(target["labels"]["model"] == BUILTIN_MODEL for target in chosen)
    return {target["labels"][role]: target["targets"][0] for target in chosen}


def scrape(address: str) -> Counter[str]:
    """Return kvroute's metrics of a process. Keys have the form `kvroute_requests_total{ok}`."""
    text = requests.get(f"http://{address}/metrics", timeout=120).text
    samples = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvroute_"):
                label = f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""
                samples[sample.name + label] = sample.value  # type: ignore[assignment]
    return samples


def total(cluster: Cluster, role: str) -> Counter[str]:
    """Return the sums of the metrics of all processes with this role."""
    return sum((scrape(address) for address in targets(cluster, role).values()), Counter[str]())


def ledger(cluster: Cluster) -> Counter[str]:
    """Return the number of prompt tokens for each cause that has any."""
    samples = total(cluster, "router")
    return +Counter(
        {cause: int(samples[f"kvroute_prompt_tokens_total{{{cause}}}"]) for cause in CAUSES}
    )


def attempts_that_failed(cluster: Cluster) -> float:
    """Return how often a request was sent again because its replica was lost."""
    return total(cluster, "router")["kvroute_requests_total{failed}"]
