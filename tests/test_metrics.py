"""Prometheus finds every process and reads from it what happened."""

import asyncio
import os
import random
import signal
from collections.abc import Iterator

import numpy as np
import psutil
import pytest
import requests
from openai import OpenAI
from prometheus_client import CollectorRegistry

from replica.kvindex.index import Index, ReplicaRecord, connect
from replica.model import BUILTIN_MODEL
from replica.protocol import Chunk
from router.insight.metrics import REFUSALS, RouterMetrics
from router.routing.fleet import Fleet
from router.routing.ledger import CAUSES
from router.routing.trips import Asked, Outcome, Trip
from tests.conftest import openai_client
from tests.records import FACTS, LOAD
from tests.scraping import scrape, targets, total, wait_until
from tests.serving import Cluster, start_cluster

PROMPTS = np.random.default_rng(7).integers(1000, 9000, (10, 100)).tolist()  # 3 blocks and 4 tokens
ANSWER_TOKENS = 4
HISTOGRAMS = (
    "decision backlog time_to_first_token inter_token time_per_output_token request".split()
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two replicas behind two routers."""
    options = ("--engine", "simulated", "--routers", "2", "--simulated-decode-ms", "1")
    with start_cluster(*options) as cluster:
        yield cluster


def reached(cluster: Cluster, role: str) -> dict[str, str]:
    """The same; none where the router that was asked has just been killed."""
    try:
        return targets(cluster, role)
    except requests.ConnectionError:
        return {}


def ask_all(client: OpenAI) -> None:
    for prompt in PROMPTS:
        client.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=ANSWER_TOKENS)


@pytest.mark.timeout(240)
def test_every_token_of_a_known_workload_is_counted_for_what_became_of_it(cluster: Cluster) -> None:
    with openai_client(cluster) as client:
        ask_all(client)
        blocks = 3 * len(PROMPTS)
        routers = targets(cluster, "router").values()
        wait_until(lambda: all(scrape(r)["kvroute_mirror_blocks"] == blocks for r in routers))
        ask_all(client)
    wait_until(lambda: total(cluster, "router")["kvroute_requests_total{ok}"] == 20)
    router, replica = total(cluster, "router"), total(cluster, "replica")
    tokens = {cause: router[f"kvroute_prompt_tokens_total{{{cause}}}"] for cause in CAUSES}
    assert {cause: n for cause, n in tokens.items() if n} == {"hit": 960, "new": 960, "tail": 80}
    assert router["kvroute_reusable_tokens_total"] == 960
    assert replica["kvroute_engine_cached_tokens_total"] == 960
    assert replica["kvroute_engine_prompt_tokens_total"] == 2000
    assert replica["kvroute_engine_stored_blocks_total"] == blocks
    assert replica["kvroute_publisher_blocks"] == blocks
    for told in (
        router["kvroute_output_tokens_total"],
        replica["kvroute_engine_output_tokens_total"],
    ):
        assert told == 20 * ANSWER_TOKENS
    counts = {name: router[f"kvroute_{name}_seconds_count"] for name in HISTOGRAMS}
    assert counts == {**dict.fromkeys(HISTOGRAMS, 20), "inter_token": 20 * (ANSWER_TOKENS - 1)}
    assert router["kvroute_requests_under_way"] == 0


@pytest.mark.timeout(240)
def test_each_process_is_a_target_for_as_long_as_it_lives(cluster: Cluster) -> None:
    document = requests.get(f"{cluster.url}/v1/cluster", timeout=10).json()
    replicas, routers = targets(cluster, "replica"), targets(cluster, "router")
    assert replicas.keys() == {replica["id"] for replica in document["replicas"]}
    assert (len(replicas), len(routers)) == (2, 2)
    victim = document["replicas"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: victim["id"] not in targets(cluster, "replica"))
    wait_until(lambda: len(targets(cluster, "replica")) == 2)
    (born,) = targets(cluster, "replica").keys() - replicas.keys()
    assert scrape(targets(cluster, "replica")[born])["kvroute_engine_requests_total"] == 0
    next(each for each in cluster.processes() if "Router" in _command(each)).kill()
    wait_until(lambda: reached(cluster, "router").keys() - routers.keys())
    wait_until(lambda: len(reached(cluster, "router")) == 2)


def _command(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def test_a_refusal_is_counted_by_its_code(cluster: Cluster) -> None:
    def refusals() -> dict[str, float]:
        counted = total(cluster, "router")
        return {
            code: n
            for code in REFUSALS
            if (n := counted[f"kvroute_refused_requests_total{{{code}}}"])
        }

    before = refusals()
    for body in ({"model": "another", "prompt": "a"}, {"prompt": "a", "n": 0}, {"prompt": "a"}):
        requests.post(f"{cluster.url}/v1/completions", json=body, timeout=10)
    assert (before, refusals()) == ({}, {"model_not_found": 1, "invalid_value": 1})


def test_metrics_of_a_process_found_by_chance_are_not_offered(cluster: Cluster) -> None:
    answer = requests.get(f"{cluster.url}/metrics", timeout=10)
    assert answer.status_code == 404
    assert "/v1/metrics/targets" in answer.json()["error"]["message"]


async def test_a_router_is_known_until_it_leaves_or_its_lease_ends(redis_url: str) -> None:
    client = connect(redis_url)
    index = Index(client, "leases")
    await index.announce_router("a", {"node": "here"}, lease_s=30)
    await index.announce_router("b", {"node": "there"}, lease_s=0.05)
    await index.announce_router("c", {"node": "nowhere"}, lease_s=30)
    await index.withdraw_router("c")
    async with asyncio.timeout(10):
        while (known := await index.routers()).keys() != {"a"}:
            await asyncio.sleep(0.01)
    assert known == {"a": {"node": "here"}}
    await client.aclose()


class Told:
    """A fleet of two replicas whose router counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=4,
            rng=random.Random(0),
            witness=RouterMetrics(self.registry),
        )
        self.fleet.update([ReplicaRecord(name, "1", 0, FACTS, LOAD) for name in "ab"])
        for name in "ab":
            self.fleet.mirror.join(name)

    def send(self, asked: Asked, to: str = "a", *, at_s: float) -> Trip:
        """A prompt of 10 tokens."""
        placement = self.fleet.place(np.arange(10, dtype=np.uint32), "", ["a", "b"], at_s)
        return self.fleet.sent(placement, to, "r", at_s, asked)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"kvroute_{name}", labels)

    def outcomes(self) -> dict[Outcome, float]:
        return {
            outcome: count
            for outcome in ("ok", "cancelled", "refused", "failed", "moved")
            if (count := self.value("requests_total", outcome=outcome))
        }


def say(trip: Trip, *, at_s: float, is_last: bool = False) -> None:
    trip.hear(Chunk(0, "", (1,), 0, finish_reason="stop" if is_last else None), at_s)


def test_an_answer_of_two_replicas_is_one_request_that_waited_once() -> None:
    told = Told()
    lost = told.send(Asked(100.0), at_s=100.0)
    lost.end("failed")
    second = told.send(Asked(100.0), "b", at_s=101.0)
    say(second, at_s=102.0)
    second.end("failed")
    third = told.send(Asked(100.0, is_resumed=True), at_s=103.0)
    for at_s in (104.0, 104.5, 105.0):
        say(third, at_s=at_s, is_last=at_s == 105.0)
    third.end()
    assert told.outcomes() == {"failed": 2, "ok": 1}
    assert told.value("time_to_first_token_seconds_sum") == 2.0
    assert told.value("time_to_first_token_seconds_count") == 1
    assert told.value("request_seconds_sum") == 5.0
    assert told.value("inter_token_seconds_sum") == 1.0
    assert told.value("time_per_output_token_seconds_sum") == 0.5


def test_a_request_sent_away_from_its_prefix_is_a_spill() -> None:
    told = Told()
    told.fleet.mirror.add("a", told.fleet.chain(np.arange(10, dtype=np.uint32), ""))
    trip = told.send(Asked(0.0), "b", at_s=0.0)
    say(trip, at_s=1.0, is_last=True)
    trip.end()
    assert told.value("spilled_requests_total") == 1
    assert told.value("prompt_tokens_total", cause="spilled") == 8
    assert told.value("prompt_tokens_total", cause="tail") == 2


def test_a_request_without_a_token_counts_no_tokens() -> None:
    told = Told()
    told.send(Asked(0.0), at_s=0.0).end("refused")
    assert told.outcomes() == {"refused": 1}
    assert sum(told.value("prompt_tokens_total", cause=cause) or 0 for cause in CAUSES) == 0
