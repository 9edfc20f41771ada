"""What the processes of a cluster tell about themselves, without a Prometheus."""

from collections import Counter

import requests
from prometheus_client.parser import text_string_to_metric_families

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.placement.ledger import CAUSES
from tests.support.serving import Cluster


def targets(cluster: Cluster, role: str) -> dict[str, str]:
    """Addresses by the ids of the processes. Raises requests.HTTPError if no router tells them."""
    response = requests.get(f"{cluster.url}/v1/metrics/targets", timeout=10)
    response.raise_for_status()
    found = [target for target in response.json() if target["labels"]["role"] == role]
    assert all(target["labels"].keys() == {"model", "role", role, "node"} for target in found)
    assert all(target["labels"]["model"] == BUILTIN_MODEL for target in found)
    return {target["labels"][role]: target["targets"][0] for target in found}


def scrape(address: str) -> Counter[str]:
    """Samples of our own, as in `kvroute_requests_total{ok}`."""
    text = requests.get(f"http://{address}/metrics", timeout=10).text
    samples = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("kvroute_"):
                label = f"{{{','.join(sample.labels.values())}}}" if sample.labels else ""
                samples[sample.name + label] = sample.value  # type: ignore[assignment]
    return samples


def total(cluster: Cluster, role: str) -> Counter[str]:
    """The sums over all processes of that role."""
    return sum((scrape(address) for address in targets(cluster, role).values()), Counter[str]())


def ledger(cluster: Cluster) -> Counter[str]:
    """Prompt tokens so far, by cause; of causes that have any."""
    told = total(cluster, "router")
    return +Counter(
        {cause: int(told[f"kvroute_prompt_tokens_total{{{cause}}}"]) for cause in CAUSES}
    )


def attempts_that_failed(cluster: Cluster) -> float:
    """Return how often a request was sent again because its replica was lost."""
    return total(cluster, "router")["kvroute_requests_total{failed}"]
