"""What routers know of the replicas' caches; they hear of them a little later than the client that
asked."""

from typing import Any

import httpx

from tests.support.serving import Cluster
from tests.support.waiting import wait_until

ASKED = 8  # times: of two routers, each is


def hit_tokens(cluster: Cluster, **body: Any) -> int:
    """Of this prompt, in the cache that has most of it, as the router that is asked knows."""
    answer = httpx.post(f"{cluster.url}/v1/route", json=body, timeout=60).raise_for_status()
    return int(answer.json()["receipts"][0]["best_hit_tokens"])


def tell_routers(cluster: Cluster, tokens: int, **body: Any) -> None:
    """Returns once all have heard of so many tokens of the prompt."""
    wait_until(lambda: min(hit_tokens(cluster, **body) for _ in range(ASKED)) >= tokens)
