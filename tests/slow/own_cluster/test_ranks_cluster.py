"""Two replicas of two data parallel ranks each, as their users see them."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI

from kvroute.contract.ranks import replicas_of, split
from tests.support.audience import Audience
from tests.support.clients import async_openai_client, openai_client
from tests.support.hits import hit_tokens
from tests.support.serving import Cluster, doctor, findings, start_cluster
from tests.support.waiting import until
from tests.support.workloads import BLOCK, ENGLISH, ask, people_table, user

RANKS = 4  # in all
SLOW = {"redis", "leases"}  # late, on a computer with too much to do


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    options = ("--replicas", "2", "--data-parallel-size", "2", "--simulated-decode-ms", "20")
    with start_cluster("--engine", "simulated", *options) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with openai_client(cluster) as client:
        yield client


def get(cluster: Cluster, path: str) -> Any:
    return httpx.get(f"{cluster.url}{path}", timeout=30).json()


def listed(cluster: Cluster) -> dict[str, Any]:
    """By the rank's id."""
    return {each["id"]: each for each in get(cluster, "/v1/cluster")["replicas"]}


def blocks_of(cluster: Cluster) -> dict[str, int]:
    return {id_: each["blocks"] or 0 for id_, each in listed(cluster).items()}


async def test_a_replica_is_one_process_with_a_cache_for_each_rank(cluster: Cluster) -> None:
    ranks = listed(cluster)
    assert sorted(split(id_)[1] for id_ in ranks) == [0, 0, 1, 1]
    assert len(replicas_of(ranks)) == len({rank["pid"] for rank in ranks.values()}) == 2
    assert get(cluster, "/health")["replicas"] == 2
    processes = [each["labels"] for each in get(cluster, "/v1/metrics/targets")]
    assert {process["replica"] for process in processes if "replica" in process} == replicas_of(
        ranks
    )


async def test_a_prompt_goes_again_to_the_rank_that_has_it_and_no_other_has(
    cluster: Cluster, client: OpenAI
) -> None:
    before = blocks_of(cluster)
    first = ask(client, user(people_table()))
    full = (first.prompt_tokens - 1) // BLOCK
    await until(lambda: blocks_of(cluster)[first.replica] >= before[first.replica] + full)
    await until(lambda: hit_tokens(cluster, messages=user(people_table())) == full * BLOCK)
    second = ask(client, user(people_table()))
    assert second.replica == first.replica
    assert second.cached_tokens == second.expected_tokens == full * BLOCK
    others = before.keys() - {first.replica}
    assert all(blocks_of(cluster)[id_] == before[id_] for id_ in others)


async def test_new_prompts_spread_over_all_ranks(cluster: Cluster, client: OpenAI) -> None:
    answers = [ask(client, user(f"{n} {people_table(5)}")) for n in range(3 * RANKS)]
    assert {answer.replica for answer in answers} == listed(cluster).keys()


def declare(cluster: Cluster, prefix: dict[str, Any]) -> None:
    httpx.post(f"{cluster.url}/v1/prefixes", json=prefix, timeout=30).raise_for_status()


async def test_a_prefix_is_pinned_at_the_ranks_that_it_is_assigned_to(
    cluster: Cluster, client: OpenAI
) -> None:
    system = [{"role": "system", "content": ENGLISH}]
    declare(cluster, {"id": "law", "messages": system, "replicas": 3})
    await until(lambda: len(get(cluster, "/v1/prefixes/law")["warm_on"]) == 3)
    shown = get(cluster, "/v1/prefixes/law")
    assert set(shown["warm_on"]) < listed(cluster).keys()
    answers = [ask(client, [*system, *user("Why?")]) for _ in range(6)]
    assert {answer.replica for answer in answers} <= set(shown["warm_on"])
    least = shown["tokens"] - shown["partial_tokens"]
    assert all(answer.cached_tokens >= least > 700 for answer in answers)


async def test_the_doctor_finds_all_accounts_of_each_rank_equal(cluster: Cluster) -> None:
    found = findings(doctor(cluster, "--json", "--audit"))
    assert {check.name for check in found if check.grade != "ok"} <= SLOW
    assert len([check for check in found if check.name.startswith("audit of")]) == RANKS
    (canary,) = [check for check in found if check.name == "canary"]
    assert "answered by 2 replicas" in canary.finding


async def test_answers_of_both_ranks_of_a_killed_replica_go_on_elsewhere(cluster: Cluster) -> None:
    async with async_openai_client(cluster.url) as client:
        pids = {id_: each["pid"] for id_, each in listed(cluster).items()}
        undisturbed = await Audience(client, words=1, tokens=400).listen()
        audience = Audience(client, words=1, tokens=400)
        listening = asyncio.create_task(audience.listen())
        await until(lambda: min(audience.pieces) >= 2)
        victim, *_ = replicas_of(audience.replicas)
        os.kill(pids[f"{victim}.0"], signal.SIGKILL)
        heard = zip(audience.replicas, audience.pieces, strict=True)
        assert {id_ for id_, pieces in heard if pieces < 300} >= {f"{victim}.0", f"{victim}.1"}
        assert await listening == undisturbed

    def is_replaced() -> bool:
        ranks = listed(cluster)
        return victim not in replicas_of(ranks) and len(ranks) == RANKS

    await until(is_replaced)
