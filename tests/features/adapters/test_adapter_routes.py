"""The routes that add, list and remove LoRA adapters: who may do it, and what is refused."""

import re
import uuid
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from kvroute.blocks.variants import NAME
from kvroute.features.adapters import adapter_operations
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.added import AdapterFiles
from kvroute.store.connection import connect
from tests.features.adapters.adapter_client import Client, Model, message, serving
from tests.support.records import record


@pytest.fixture
async def client(redis: Redis) -> AsyncIterator[Client]:
    async with serving(Model(Adapters(redis, uuid.uuid4().hex))) as client:
        yield client


async def test_the_answers_are_those_of_vllm(client: Client) -> None:
    answer = await client.load("sql")
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    assert client.model.checked == ["/srv/adapters/sql"]
    again = await client.load("sql")
    assert "The lora adapter 'sql' has already been loaded." in message(again)
    assert client.model.checked == ["/srv/adapters/sql"]


async def test_an_unknown_adapter_cannot_be_removed(client: Client) -> None:
    assert "The lora adapter 'sql' cannot be found" in message(await client.unload("sql"), 404)


async def test_a_broken_adapter_is_refused_with_the_replicas_reason(client: Client) -> None:
    client.model.check = lambda path: AdapterFiles(problem="its end is missing")
    assert message(await client.load("sql")) == 'lora_path is "sql": its end is missing'
    assert await client.names() == []


async def test_another_adapter_replaces_one_if_it_may(client: Client) -> None:
    await client.load("sql", "old")
    assert (await client.load("sql", "new", load_inplace=True)).status_code == 200
    found = client.model.adapters.find("sql")
    assert found
    assert found.path == "/srv/adapters/new"


@pytest.mark.parametrize("name", ["", "a:b", "a@b", "-a", "a b", 129 * "a", "é", "a\n"])
def test_a_name_has_few_characters(name: str) -> None:
    assert not re.fullmatch(NAME, name)


@pytest.mark.parametrize("name", ["m", "static"])
async def test_a_name_that_is_used_otherwise_is_refused(client: Client, name: str) -> None:
    assert "choose another name" in message(await client.load(name, "sql"))


@pytest.mark.parametrize("path", ["../x", "/etc", "/srv/adapters", "a/../../b"])
async def test_a_path_out_of_the_folder_reaches_no_replica(client: Client, path: str) -> None:
    assert "/srv/adapters" in message(await client.load("sql", path))
    assert client.model.checked == []


async def test_a_misspelt_field_is_refused(client: Client) -> None:
    assert "lora_pth" in message(await client.load("sql", lora_pth="x"))


async def test_a_cluster_without_the_folder_says_how_to_get_one(redis: Redis) -> None:
    async with serving(Model(Adapters(redis, "m"), root=None)) as client:
        assert "--lora-root FOLDER" in message(await client.load("sql"))


async def test_without_a_replica_that_loads_adapters_the_client_tries_later(
    client: Client,
) -> None:
    client.model.replicas.own_records = [record("r")]
    assert "no replica can load adapters" in message(await client.load("sql"), 503)


async def test_without_redis_nothing_is_added() -> None:
    async with serving(Model(Adapters(connect("redis://127.0.0.1:1"), "m"))) as client:
        assert "Redis is away" in message(await client.load("sql"), 503)
        assert await client.names() == []


async def test_a_tenant_needs_keys(client: Client) -> None:
    assert "has no API keys" in message(await client.load("sql", tenant="acme"))
    client.close_gate()
    assert "expected the name of a tenant" in message(await client.load("sql", tenant="a b"))
    assert (await client.load("sql", tenant="acme")).status_code == 200


async def test_two_tenants_and_all_others_can_use_one_name(client: Client) -> None:
    client.close_gate()
    for tenant in ("acme", "other", ""):
        assert (await client.load("sql", f"sql-{tenant}", tenant=tenant)).status_code == 200
    found = {tenant: client.model.adapters.find("sql", tenant) for tenant in ("acme", "other", "")}
    assert {
        tenant: each and each.path[len("/srv/adapters/sql-") :] for tenant, each in found.items()
    } == {
        "acme": "acme",
        "other": "other",
        "": "",
    }


async def test_a_tenant_has_as_many_adapters_as_it_may(client: Client) -> None:
    client.close_gate(max_adapters=1)
    assert (await client.load("sql", tenant="acme")).status_code == 200
    refusal = await client.load("law", tenant="acme")
    assert "tenant acme may have 1 adapter" in message(refusal, 409)
    assert (await client.load("sql", "new", tenant="acme", load_inplace=True)).status_code == 200
    assert (await client.load("law")).status_code == 200


async def test_a_model_has_as_many_adapters_as_it_may(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_operations, "MAX_ADAPTERS", 1)
    await client.load("sql")
    assert "which is the maximum" in message(await client.load("law"), 409)


async def test_a_removal_that_takes_long_goes_on_after_the_answer(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_operations, "REMOVAL_S", 0.0)
    await client.load("sql")
    answer = await client.unload("sql")
    assert answer.status_code == 202
    assert client.model.adapters.find("sql") is None
    await client.model.adapters._remove_unused()
    assert await client.names() == []
