"""A cluster whose routers order pulls between replicas."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.scraping import total
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import wait_until

BLOCK = 32  # tokens
PROMPT = [7] * (100 * BLOCK)
BURST = 16  # requests at once, so that both replicas are needed

numbers = itertools.count(100)


@pytest.fixture(scope="module", params=[(), ("--wire-tls",)], ids=["plain", "encrypted"])
def pulling(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    options = ("--engine", "simulated", "--replicas", "2", "--host-cache-gb", "2", "--pull", "on")
    with start_cluster(*options, *request.param) as cluster:
        yield cluster


def test_a_burst_with_one_prefix_is_pulled_to_the_other_replica(pulling: Cluster) -> None:
    with httpx.Client(base_url=pulling.url, timeout=60) as client:

        def ask(number: int) -> int:
            prompt = PROMPT + [number] * (40 * BLOCK)
            body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True}
            response = client.post("/v1/completions", json=body)
            response.raise_for_status()
            return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        def pulls_some() -> float:
            with ThreadPoolExecutor(BURST) as threads:
                list(threads.map(ask, [next(numbers) for _ in range(BURST)]))
            return total(pulling, "router")["kvroute_pulls_total{complete}"]

        ask(next(numbers))
        wait_until(pulls_some, 30)
    assert total(pulling, "router")["kvroute_pulled_tokens_total"] >= len(PROMPT) - BLOCK
