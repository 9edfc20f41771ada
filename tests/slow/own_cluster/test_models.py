"""Several models behind one endpoint: each has its own replicas, caches and names."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from kvroute.app import build
from kvroute.replay.workload.trace import TraceError, read
from tests.support.clients import async_openai_client
from tests.support.hits import wait_for_routers
from tests.support.json_lines import read_lines
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import until
from tests.support.workloads import ask, people_table, user

LARGE, SMALL = "lab/large", "small"
MODELS = [
    {"served_model_name": LARGE, "replicas": 2},
    {"served_model_name": SMALL, "replicas": 1, "block_size": 64},
]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the request log."""
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def cluster(log: Path) -> Iterator[Cluster]:
    """The built-in model under two names."""
    with start_cluster(
        *("--engine", "simulated", "--models", json.dumps(MODELS), "--request-log", str(log)),
    ) as cluster:
        yield cluster


def get(cluster: Cluster, path: str, **query: str) -> Any:
    return httpx.get(cluster.url + path, params=query, timeout=30).raise_for_status().json()


def replicas(cluster: Cluster, model: str) -> dict[str, int]:
    """Process ids by replica ids."""
    found = get(cluster, "/v1/cluster")["replicas"]
    return {replica["id"]: replica["pid"] for replica in found if replica["model"] == model}


def kvroute(cluster: Cluster, *args: str) -> subprocess.CompletedProcess[str]:
    command = [*KVROUTE, *args, "--url", cluster.url]
    env = os.environ | {"COLUMNS": "120"}  # room for a table
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def test_one_model_has_the_deployment_it_always_had_and_several_have_one_each() -> None:
    def deployments(**given: Any) -> dict[str, int]:
        """Replicas by Serve's name for them."""
        (bound,) = build({"redis_url": "redis://r", **given})._bound_deployment.init_args
        found = [replica._bound_deployment for _, replicas in bound for replica in replicas]
        return {each.name: each.num_replicas for each in found}

    assert deployments() == {"Replica": 2}
    assert deployments(models=MODELS) == {"Replica:lab=2Flarge": 2, "Replica:small": 1}


def test_both_models_are_listed_and_their_replicas_counted(cluster: Cluster) -> None:
    assert [card["id"] for card in get(cluster, "/v1/models")["data"]] == [LARGE, SMALL]
    assert get(cluster, f"/v1/models/{LARGE}")["id"] == LARGE
    health = get(cluster, "/health")
    assert (health["replicas"], health["models"]) == (3, {LARGE: 2, SMALL: 1})


def test_a_request_goes_to_the_replicas_of_its_model_and_no_other(
    cluster: Cluster, client: OpenAI
) -> None:
    for model in (LARGE, SMALL):
        answers = [ask(client, user(f"number {n}"), model=model) for n in range(10)]
        assert {answer.replica for answer in answers} == replicas(cluster, model).keys()


def test_what_one_model_has_cached_is_no_hit_for_the_other(
    cluster: Cluster, client: OpenAI
) -> None:
    prompt = user("apart " + people_table())
    for model, block in ((LARGE, 32), (SMALL, 64)):
        first = ask(client, prompt, model=model)
        full = (first.prompt_tokens - 1) // block * block
        wait_for_routers(cluster, full, model=model, messages=prompt)
        second = ask(client, prompt, model=model)
        assert (first.expected_tokens, first.cached_tokens) == (0, 0)
        assert (second.expected_tokens, second.cached_tokens) == (full, full)


@pytest.mark.parametrize(("model", "status"), [("gpt-4", 404), (None, 400)])
def test_a_request_must_name_a_model_that_is_served(
    cluster: Cluster, model: str | None, status: int
) -> None:
    body = {"model": model, "prompt": "Hello"}
    for path in ("/v1/completions", "/v1/route", "/v1/prefixes"):
        refusal = httpx.post(cluster.url + path, json={**body, "id": "x"}, timeout=30)
        error = refusal.json()["error"]
        assert (refusal.status_code, error["param"]) == (status, "model")
        assert error["message"].rstrip(".").endswith(f"this server has '{LARGE}' and '{SMALL}'")


def test_a_named_prefix_belongs_to_one_model(cluster: Cluster, client: OpenAI) -> None:
    text = people_table(10)
    for model in (LARGE, SMALL):
        done = kvroute(cluster, "prefixes", "add", "people", "--prompt", text, "--model", model)
        assert done.returncode == 0, done.stderr
        body = {"model": model, "prompt": "Who?", "prefix_id": "people"}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30)
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 500
    assert kvroute(cluster, "prefixes", "rm", "people", "--model", SMALL).returncode == 0
    assert [each["model"] for each in get(cluster, "/v1/prefixes")["data"]] == [LARGE]
    assert get(cluster, "/v1/prefixes", model=SMALL)["data"] == []
    with pytest.raises(openai.NotFoundError, match="people"):
        client.completions.create(model=SMALL, prompt="Who?", extra_body={"prefix_id": "people"})


def test_prometheus_is_told_of_each_model_apart(cluster: Cluster, client: OpenAI) -> None:
    def output_tokens(model: str) -> float:
        """As the one router counts them."""
        (address,) = (
            target["targets"][0]
            for target in get(cluster, "/v1/metrics/targets")
            if target["labels"].items() >= {"model": model, "role": "router"}.items()
        )
        told = httpx.get(f"http://{address}/metrics", timeout=30).text
        families = text_string_to_metric_families(told)
        samples = {s.name: s.value for family in families for s in family.samples}
        assert samples["process_resident_memory_bytes"] > 1e6
        return samples["kvroute_output_tokens_total"]

    before = {model: output_tokens(model) for model in (LARGE, SMALL)}
    ask(client, user("Count me"), model=SMALL, max_tokens=7)
    after = {model: output_tokens(model) - before[model] for model in before}
    assert after == {LARGE: 0, SMALL: 7}
    labels = [target["labels"] for target in get(cluster, "/v1/metrics/targets")]
    assert len({label["router"] for label in labels if label["role"] == "router"}) == 1
    assert sum(label["role"] == "replica" for label in labels) == 3


def test_the_audit_finds_all_replicas_and_no_drift(cluster: Cluster, client: OpenAI) -> None:
    for model in (LARGE, SMALL):
        ask(client, user(people_table()), model=model)
    audited = get(cluster, "/v1/cluster/audit")["replicas"]
    assert {each["id"]: each["model"] for each in audited} == {
        id_: model for model in (LARGE, SMALL) for id_ in replicas(cluster, model)
    }
    assert [count for each in audited for count in each["drift"].values()] == [0] * 9
    assert {each["model"] for each in audited if each["blocks"]["redis"]} == {LARGE, SMALL}


async def test_the_request_log_is_replayed_model_by_model(
    cluster: Cluster, client: OpenAI, log: Path
) -> None:
    prompt = user(people_table(17))
    tokens = {ask(client, prompt, model=model).prompt_tokens for model in (LARGE, SMALL, LARGE)}

    def logged(model: str) -> int:
        lines = read_lines(log.iterdir())
        return sum(line["model"] == model and line["input_length"] in tokens for line in lines)

    await until(lambda: (logged(LARGE), logged(SMALL)) == (2, 1))
    requests = read(log, limit=None, seed=0, model=LARGE)
    assert {request.model for request in requests} == {LARGE}
    with pytest.raises(TraceError, match="set --model"):
        read(log, limit=None, seed=0)


def test_the_commands_tell_the_models_apart(cluster: Cluster) -> None:
    shown = kvroute(cluster, "status").stdout
    assert all(model in shown for model in ("model", LARGE, SMALL))
    (replica,) = replicas(cluster, SMALL)
    assert replica in kvroute(cluster, "explain", "Hello", "--model", SMALL).stdout
    for command in (("scale", "2"), ("explain", "Hello"), ("prefixes", "rm", "x")):
        refused = kvroute(cluster, *command)
        assert (refused.returncode, LARGE in refused.stderr) == (1, True), command


async def test_a_model_whose_replica_dies_waits_and_the_other_does_not_notice(
    cluster: Cluster,
) -> None:
    (killed,), large = replicas(cluster, SMALL), replicas(cluster, LARGE)
    async with async_openai_client(cluster.url) as client:
        stream = await client.completions.create(
            model=LARGE, prompt="Go on", max_tokens=1000, stream=True
        )
        await anext(stream)
        os.kill(replicas(cluster, SMALL)[killed], signal.SIGKILL)
        answer = await client.completions.with_raw_response.create(model=SMALL, prompt="Hello")
        assert answer.headers["x-kvroute-replica"] not in {killed, *large}
        assert get(cluster, "/health")["models"] == {LARGE: 2, SMALL: 1}
        reason = [event.choices[0].finish_reason async for event in stream][-1]
    assert reason == "length"
    assert replicas(cluster, LARGE) == large


def test_each_model_is_scaled_by_itself(cluster: Cluster) -> None:
    large = replicas(cluster, LARGE)
    for count in (2, 1):
        done = kvroute(cluster, "scale", str(count), "--model", SMALL)
        assert done.returncode == 0, done.stderr
        assert get(cluster, "/health")["models"] == {LARGE: 2, SMALL: count}
    assert replicas(cluster, LARGE) == large
