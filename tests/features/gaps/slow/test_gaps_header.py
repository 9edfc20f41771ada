"""Requests choose their own limit of the time between tokens; the engines are simulated."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import httpx
import pytest

from tests.support.serving import Cluster, start_cluster

PREFILL, DECODE_MS = 5000, 10  # tokens per second, and milliseconds of a step without prompts
LIMIT_MS = 100
PROMPT = list(range(1000, 9000))  # takes 1.6 s
PATH = "/v1/completions"
HEADER = "x-kvroute-tpot-ms"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    engine = ("--engine", "simulated", "--replicas", "1", "--simulated-blocks", "4000")
    speed = (f"--simulated-prefill-tokens-per-s={PREFILL}", f"--simulated-decode-ms={DECODE_MS}")
    limits = ("--slo-tpot-ms", f"{LIMIT_MS}", "--slo-ttft-ms", "60000")
    with start_cluster(*engine, *speed, *limits) as running:
        longest_gap_s(running, {}, first=1)  # the engine learns its times
        yield running


def longest_gap_s(cluster: Cluster, headers: dict[str, str], *, first: int) -> float:
    """Return the longest time between chunks of an answer beside which a prompt is computed.

    Args:
        first: the first token of the prompt, so that it is not cached.
    """
    body = {"prompt": "a story", "max_tokens": 300, "stream": True}
    long = {"prompt": [first, *PROMPT], "max_tokens": 1}
    times_s = list[float]()
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=cluster.url, timeout=60) as client:
        with client.stream("POST", PATH, json=body, headers=headers) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    times_s.append(time.monotonic())
                if len(times_s) == 20 and line:
                    sent = pool.submit(client.post, PATH, json=long, headers=headers)
        assert sent.result().status_code == 200
    return max(b - a for a, b in pairwise(times_s))


def test_a_request_chooses_its_own_limit(cluster: Cluster) -> None:
    usual_s = longest_gap_s(cluster, {}, first=2)
    unlimited_s = longest_gap_s(cluster, {HEADER: "0"}, first=3)
    assert usual_s < unlimited_s / 3


def test_another_value_is_refused_with_the_remedy(cluster: Cluster) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    refused = httpx.post(f"{cluster.url}{PATH}", json=body, headers={HEADER: "fast"}, timeout=60)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "invalid_value"
    assert "x-kvroute-tpot-ms is 'fast'; expected the most milliseconds" in error["message"]
