"""What the live page of a real cluster is sent."""

import copy
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from kvroute.features.page.live import LISTENERS
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.placement.ledger import CAUSES
from tests.support.clients import openai_client
from tests.support.serving import Cluster

PROMPTS = np.random.default_rng(7).integers(1000, 9000, (5, 100)).tolist()  # 3 blocks and 4 tokens


class Follower:
    """Listens to a cluster's page, and knows what the page knows."""

    def __init__(self, lines: Iterator[str]) -> None:
        self.things: dict[str, Any] = {}
        self._lines = lines

    def read(self) -> None:
        """The next event."""
        line = next(line for line in self._lines if line.startswith("data: "))
        told = json.loads(line.removeprefix("data: "))
        self.things |= told["changed"]
        for key in told["gone"]:
            del self.things[key]

    def until(self, is_true: Callable[["Follower"], object]) -> None:
        for _ in range(30):
            self.read()
            if is_true(self):
                return
        raise AssertionError(f"it did not become true: {self.things}")

    def all(self, kind: str) -> dict[str, Any]:
        return {key: value for key, value in self.things.items() if key.startswith(kind)}

    def has_answers(self, count: int) -> bool:
        return bool(self.things["ledger"]["requests"] == count)


@contextmanager
def follow(cluster: Cluster) -> Iterator[Follower]:
    url = f"{cluster.url}/v1/cluster/live"
    with httpx.stream("GET", url, timeout=30) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield Follower(answer.iter_lines())


@pytest.fixture
def cluster(pair: Cluster) -> Cluster:
    """With one router: all that is asked is on its page."""
    return pair


def test_requests_are_seen_with_receipts_and_a_ledger_by_all_who_listen(cluster: Cluster) -> None:
    with follow(cluster) as one, follow(cluster) as other, openai_client(cluster) as client:
        for follower in (one, other):
            follower.read()
        before = copy.deepcopy(one.things)
        for prompt in PROMPTS * 2:
            client.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=2)
        for follower in (one, other):
            follower.until(lambda each: each.has_answers(before["ledger"]["requests"] + 10))
        assert one.things["ledger"] == other.things["ledger"]
        decisions = [each for key, each in one.all("decision/").items() if key not in before]
        assert [decision["outcome"] for decision in decisions] == ["ok"] * 10
        assert [decision["prompt_tokens"] for decision in decisions] == [100] * 10
        for told in decisions:
            choice, *_ = told["receipt"]["replicas"]
            assert told["receipt"]["choice"] == told["replica"] == choice["id"]
            assert sum(told["ledger"].values()) == 100
            assert told["ttft_s"] > 0
        already = before["ledger"]["tokens"]
        sums = {cause: n - already[cause] for cause, n in one.things["ledger"]["tokens"].items()}
        assert sum(sums.values()) == 1000
        assert sums == {cause: sum(told["ledger"][cause] for told in decisions) for cause in CAUSES}
        assert sums["hit"] + sums["unexpected_hit"] == sum(
            told["cached_tokens"] for told in decisions
        )
        tiles = one.all("replica/")
        assert len(tiles) == 2
        already_asked = sum(before[key]["prompt_tokens"] for key in tiles)
        assert sum(tile["prompt_tokens"] for tile in tiles.values()) - already_asked == 1000
        assert one.things["router"]["routers"] == 1


def test_a_page_that_is_closed_makes_room_for_another(cluster: Cluster) -> None:
    with ExitStack() as pages:
        followers = [pages.enter_context(follow(cluster)) for _ in range(LISTENERS)]
        for follower in followers:
            follower.read()
        with httpx.stream("GET", f"{cluster.url}/v1/cluster/live", timeout=30) as refused:
            assert refused.status_code == 503
            assert "close one" in str(refused.read())
    deadline = time.monotonic() + 30
    while True:
        with httpx.stream("GET", f"{cluster.url}/v1/cluster/live", timeout=30) as answer:
            if answer.status_code == 200:
                return
        assert time.monotonic() < deadline, "no page that was closed is forgotten"
        time.sleep(0.2)
