"""A cluster whose replicas have a second tier of their cache in host memory."""

import itertools
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.clearing import cache_clearer
from tests.support.records import NO_DRIFT
from tests.support.scraping import total
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet

BLOCKS = 160  # of a replica's own cache
BLOCK = 32  # tokens
PROMPT = 50 * BLOCK
FLOOD = 12  # prompts: about four times what one replica's own cache holds, on two replicas

numbers = itertools.count(1000)


@pytest.fixture(scope="module")
def tiered() -> Iterator[Cluster]:
    """Two simulated replicas; the tier has room for 476 blocks."""
    size = ("--simulated-blocks", f"{BLOCKS}", "--host-cache-gb", "2")
    with start_cluster("--engine", "simulated", "--replicas", "2", *size) as cluster:
        yield cluster


@pytest.fixture
def client(tiered: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiered.url, timeout=60) as client:
        yield client


def complete(client: httpx.Client, token: int, tokens: int = PROMPT, **more: Any) -> httpx.Response:
    body = {"prompt": [token] * tokens, "max_tokens": 2, "ignore_eos": True, **more}
    response = client.post("/v1/completions", json=body)
    response.raise_for_status()
    return response


def cached(response: httpx.Response) -> int:
    details = response.json()["usage"]["prompt_tokens_details"]
    return int(details["cached_tokens"])


def replicas(client: httpx.Client) -> list[dict[str, Any]]:
    return list(client.get("/v1/cluster").json()["replicas"])


def has_no_drift(client: httpx.Client) -> bool:
    """Table, Redis and router have of all replicas what their engines have, in both tiers."""
    audits = client.get("/v1/cluster/audit").json()["replicas"]
    return [audit["drift"] for audit in audits] == [NO_DRIFT] * 2


def test_what_a_gpu_has_evicted_is_found_in_host_memory(
    tiered: Cluster, client: httpx.Client
) -> None:
    ours = next(numbers)
    complete(client, ours)
    for _ in range(FLOOD):
        complete(client, next(numbers))
    wait_until(lambda: all(replica["blocks"] > BLOCKS for replica in replicas(client)))
    again = complete(client, ours, PROMPT + BLOCK)
    assert cached(again) >= PROMPT - BLOCK
    assert int(again.headers["x-kvroute-expected-tokens"]) == cached(again)
    assert total(tiered, "router")["kvroute_hit_prompt_tokens_total{host}"] > 0
    wait_until(lambda: total(tiered, "replica")["kvroute_engine_reloaded_tokens_total"] > 0)
    wait_until(lambda: has_no_drift(client))


def test_a_replica_tells_of_its_tier(client: httpx.Client) -> None:
    for replica in replicas(client):
        assert replica["host"]["blocks"] == int(2e9) // (BLOCK * 131_072)
        assert replica["host"]["gb_per_s"] > 0


def test_a_receipt_says_what_a_reload_costs(client: httpx.Client) -> None:
    ours = next(numbers)
    complete(client, ours)
    for _ in range(FLOOD):
        complete(client, next(numbers))
    body = {"prompt": [ours] * (PROMPT + BLOCK), "max_tokens": 2}
    (receipt,) = client.post("/v1/route", json=body).json()["receipts"]
    first = receipt["replicas"][0]
    assert first["host_tokens"] >= PROMPT - BLOCK
    assert 0 < first["reload_s"] == pytest.approx(first["terms_s"]["reload"])


def test_a_prefix_pinned_in_host_memory_outlasts_a_flood_of_both_tiers(
    tiered: Cluster, client: httpx.Client
) -> None:
    text = "Name the law that you rely on. " * 150
    added = kvroute("prefixes", "add", "law", "--host", "--prompt", text, "--url", tiered.url)
    assert "warm on 2 of 2 replicas" in added, added
    for _ in range(6 * FLOOD):
        complete(client, next(numbers))
    shown = client.get("/v1/prefixes/law").json()
    assert (len(shown["warm_on"]), shown["pinned"]) == (2, "host")
    body = {"prompt": "Which one?", "max_tokens": 2, "prefix_id": "law"}
    answer = client.post("/v1/completions", json=body)
    assert cached(answer) == shown["full_blocks"] * BLOCK
    assert "host" in kvroute("prefixes", "list", "--url", tiered.url)
    kvroute("prefixes", "rm", "law", "--url", tiered.url)
    wait_until(lambda: has_no_drift(client))


def kvroute(*arguments: str) -> str:
    """What the command prints."""
    return subprocess.run([*KVROUTE, *arguments], check=True, capture_output=True, text=True).stdout


def test_a_cleared_cache_is_empty_in_both_tiers(tiered: Cluster, client: httpx.Client) -> None:
    ours = next(numbers)
    complete(client, ours)
    with cache_clearer(tiered) as clear:
        for replica in replicas(client):
            clear(replica["id"])
    wait_until(lambda: not any(replica["blocks"] for replica in replicas(client)))
    assert cached(complete(client, ours)) == 0
    wait_until(lambda: has_no_drift(client))


def test_a_replica_that_starts_begins_with_an_empty_tier(
    tiered: Cluster, client: httpx.Client
) -> None:
    wait_for_fleet(tiered)
    ours = next(numbers)
    first = complete(client, ours)
    served_by = first.headers["x-kvroute-replica"]
    (victim,) = (replica for replica in replicas(client) if replica["id"] == served_by)
    psutil.Process(victim["pid"]).kill()
    wait_for_fleet(tiered)
    assert cached(complete(client, ours)) == 0
    wait_until(lambda: has_no_drift(client))
