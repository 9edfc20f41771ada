"""The cache hits that routers expect.

A client can get its answer before the routers know of the blocks that its request has cached.
"""

from typing import Any

import httpx

from tests.support.serving import Cluster
from tests.support.waiting import wait_until

ASKED = 8  # number of requests; very likely, both of two routers get at least one of them


def hit_tokens(cluster: Cluster, **body: Any) -> int:
    """Ask a router how many tokens of this prompt the best replica has cached."""
    answer = httpx.post(f"{cluster.url}/v1/route", json=body, timeout=60).raise_for_status()
    return int(answer.json()["receipts"][0]["best_hit_tokens"])


def wait_for_routers(cluster: Cluster, tokens: int, **body: Any) -> None:
    """Wait until all routers know that `tokens` tokens of the prompt are cached."""
    wait_until(lambda: min(hit_tokens(cluster, **body) for _ in range(ASKED)) >= tokens)
