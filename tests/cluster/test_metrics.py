"""Prometheus finds every process and reads from it what happened."""

import os
import signal
from collections import Counter

import numpy as np
import requests
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.observability.metrics import REFUSALS
from kvroute.router.placement.ledger import CAUSES
from tests.support.clients import openai_client
from tests.support.scraping import scrape, targets, total
from tests.support.serving import Cluster
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import BLOCK

PROMPTS = np.random.default_rng(7).integers(1000, 9000, (10, 100)).tolist()  # 3 blocks and 4 tokens
ANSWER_TOKENS = 4
HISTOGRAMS = "decision backlog time_to_first_token request".split()
GAPS = "inter_token time_per_output_token".split()  # fewer where tokens came together


def ask_all(client: OpenAI) -> None:
    for prompt in PROMPTS:
        client.completions.create(model=BUILTIN_MODEL, prompt=prompt, max_tokens=ANSWER_TOKENS)


def test_every_token_of_a_known_workload_is_counted_for_what_became_of_it(cluster: Cluster) -> None:
    def mirrors() -> dict[str, float]:
        routers = targets(cluster, "router").values()
        return {router: scrape(router)["kvroute_mirror_blocks"] for router in routers}

    blocks = 3 * len(PROMPTS)
    mirrored = {router: known + blocks for router, known in mirrors().items()}
    before = {role: total(cluster, role) for role in ("router", "replica")}
    answered = before["router"]["kvroute_requests_total{ok}"] + 20
    with openai_client(cluster) as client:
        ask_all(client)
        wait_until(lambda: mirrors() == mirrored)
        ask_all(client)
    wait_until(lambda: total(cluster, "router")["kvroute_requests_total{ok}"] == answered)
    router, replica = (total(cluster, role) for role in ("router", "replica"))
    assert router["kvroute_requests_in_flight"] == 0
    router.subtract(before["router"])
    replica.subtract(before["replica"])
    tokens = {cause: router[f"kvroute_prompt_tokens_total{{{cause}}}"] for cause in CAUSES}
    # On a busy machine a router may hear too late that the request before has ended.
    spilled = tokens.pop("spilled")
    assert spilled <= 960 / 2
    hits = 960 - spilled
    assert {cause: n for cause, n in tokens.items() if n} == {"hit": hits, "new": 960, "tail": 80}
    assert router["kvroute_reusable_tokens_total"] == 960
    assert replica["kvroute_engine_cached_tokens_total"] == hits
    assert replica["kvroute_engine_prompt_tokens_total"] == 2000
    assert replica["kvroute_engine_stored_blocks_total"] == blocks + spilled / BLOCK
    wait_until(
        lambda: (
            total(cluster, "replica")["kvroute_publisher_blocks"]
            - before["replica"]["kvroute_publisher_blocks"]
            == blocks + spilled / BLOCK
        )
    )
    for told in (
        router["kvroute_output_tokens_total"],
        replica["kvroute_engine_output_tokens_total"],
    ):
        assert told == 20 * ANSWER_TOKENS
    counts = {name: router[f"kvroute_{name}_seconds_count"] for name in HISTOGRAMS}
    assert counts == dict.fromkeys(HISTOGRAMS, 20)
    gaps, tokens_each = (router[f"kvroute_{name}_seconds_count"] for name in GAPS)
    assert 10 < tokens_each <= 20
    assert tokens_each <= gaps <= 20 * (ANSWER_TOKENS - 1)


def test_each_replica_is_a_target_for_as_long_as_it_lives(cluster: Cluster) -> None:
    wait_for_fleet(cluster)
    document = requests.get(f"{cluster.url}/v1/cluster", timeout=10).json()
    replicas, routers = targets(cluster, "replica"), targets(cluster, "router")
    assert replicas.keys() == {replica["id"] for replica in document["replicas"]}
    assert (len(replicas), len(routers)) == (4, 2)
    victim = document["replicas"][0]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: victim["id"] not in targets(cluster, "replica"))
    wait_for_fleet(cluster)
    (born,) = targets(cluster, "replica").keys() - replicas.keys()
    assert scrape(targets(cluster, "replica")[born])["kvroute_engine_requests_total"] == 0


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
    refused = Counter(refusals())
    refused.subtract(before)
    assert +refused == {"model_not_found": 1, "refused_by_engine": 1}


def test_metrics_of_a_process_found_by_chance_are_not_offered(cluster: Cluster) -> None:
    answer = requests.get(f"{cluster.url}/metrics", timeout=10)
    assert answer.status_code == 404
    assert "/v1/metrics/targets" in answer.json()["error"]["message"]
