"""LoRA adapters as clients of a cluster see them: simulated engines, the openai client."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.hits import wait_for_routers
from tests.support.json_lines import read_lines
from tests.support.serving import Cluster
from tests.support.waiting import until
from tests.support.workloads import ADAPTERS, people_table, user


@pytest.fixture
def cluster(named: Cluster) -> Cluster:
    return named


def ask(client: OpenAI, model: str, text: str, **body: Any) -> tuple[str, int]:
    """The replica that answered, and what it had cached."""
    raw = client.chat.completions.with_raw_response.create(
        model=model, messages=[{"role": "user", "content": text}], max_tokens=4, extra_body=body
    )
    answer = raw.parse()
    assert answer.model == model.rpartition(":")[2]
    usage: Any = answer.usage
    return raw.headers["x-kvroute-replica"], usage.prompt_tokens_details.cached_tokens


def test_adapters_are_listed_as_models_with_their_parent(client: OpenAI, adapters: Path) -> None:
    cards = {card.id: card.model_dump() for card in client.models.list()}
    assert list(cards) == [BUILTIN_MODEL, *ADAPTERS]
    assert cards["sql"]["parent"] == BUILTIN_MODEL
    assert cards["sql"]["root"] == str(adapters / "sql")
    assert client.models.retrieve("law").id == "law"


def test_the_same_text_is_cached_for_each_adapter_apart(client: OpenAI, cluster: Cluster) -> None:
    text = people_table()
    for model in (BUILTIN_MODEL, "sql", "law"):
        replica, cached = ask(client, model, text)
        assert cached == 0
        wait_for_routers(cluster, 1000, model=model, messages=user(text))
        again = ask(client, model, text)
        assert again[0] == replica
        assert again[1] > 1000
    assert ask(client, f"{BUILTIN_MODEL}:sql", text)[1] > 1000


def test_new_prompts_go_where_their_adapter_is_loaded(client: OpenAI, cluster: Cluster) -> None:
    for name in ADAPTERS:
        there = {ask(client, name, f"{name}, question {n}?")[0] for n in range(8)}
        assert len(there) == 1
        (receipt,) = route(cluster, name)["receipts"]
        assert receipt["lora"] == name
        loading = {each["id"]: each["terms_s"]["setup"] for each in receipt["replicas"]}
        assert {id_ for id_, seconds in loading.items() if not seconds} == there


def route(cluster: Cluster, model: str) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "And now?"}]}
    answer = httpx.post(f"{cluster.url}/v1/route", json=body, timeout=20).raise_for_status()
    return dict(answer.json())


def test_an_adapter_in_demand_is_loaded_on_more_replicas(client: OpenAI) -> None:
    long = " ".join(str(n) for n in range(1200))
    with ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask, client, "sql", f"{n} {long}") for n in range(24)]
        assert len({each.result()[0] for each in asked}) > 1


async def test_a_named_prefix_goes_before_an_adapters_prompt_and_shares_no_cache_with_it(
    client: OpenAI, cluster: Cluster
) -> None:
    declared = {"id": "people", "prompt": people_table()}
    httpx.post(f"{cluster.url}/v1/prefixes", json=declared, timeout=20)  # noqa: ASYNC210
    url = f"{cluster.url}/v1/prefixes/people"
    await until(lambda: len(httpx.get(url, timeout=10).json()["warm_on"]) == 3)
    assert ask(client, BUILTIN_MODEL, "Who lives in Oslo?", prefix_id="people")[1] > 1000
    assert ask(client, "law", "Who lives in Oslo?", prefix_id="people")[1] == 0
    assert ask(client, "law", "Who lives in Lima?", prefix_id="people")[1] > 1000


@pytest.mark.parametrize("name", ["poems", f"{BUILTIN_MODEL}:poems", "law:sql"])
def test_an_unknown_adapter_is_not_found_and_told_what_there_is(client: OpenAI, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match=f"'{name}' does not exist.*'sql' and 'law'"):
        ask(client, name, "Hello")


async def test_the_request_log_says_the_adapter(
    client: OpenAI, cluster: Cluster, adapters: Path
) -> None:
    ask(client, "sql", "a line for the adapter")
    ask(client, BUILTIN_MODEL, "a line for the model")

    def lines() -> list[dict[str, Any]]:
        return read_lines((adapters / "log").glob("*.jsonl"))

    await until(lambda: {line.get("lora") for line in lines()} == {None, "sql", "law"})
