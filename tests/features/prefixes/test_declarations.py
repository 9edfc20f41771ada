"""Prefixes are declared, shown as they are, and refused where they do not fit."""

import contextlib
import json
import random
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode

from kvroute.blocks.chain import Scope
from kvroute.blocks.tiers import HOST
from kvroute.contract.own_names import TENANT_SEPARATOR
from kvroute.contract.records import Load, ReplicaRecord, TierFacts
from kvroute.features.gate import Caller
from kvroute.features.prefixes.catalogue import Catalogue
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.declaration import MAX_TTL_S, PrefixDeclaration
from kvroute.features.prefixes.declarations import Declarations
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import Warm
from kvroute.router.api.errors import ApiError
from kvroute.router.api.parsing import parse
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.connection import connect
from tests.support.records import record
from tests.support.waiting import until

BLOCK = 4
BUDGET = 10  # blocks that each replica may pin
CONTEXT = 200  # tokens
A = Caller("a", frozenset({"use", "manage"}), "salt of a")
B = Caller("b", frozenset({"use", "manage"}), "salt of b")
NO_PINS: Mapping[str, Warm] = {}


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(1))
    see(fleet, a=NO_PINS, b=NO_PINS)
    return fleet


@pytest.fixture
async def catalogue(redis_url: str, fleet: Fleet) -> AsyncIterator[Catalogue]:
    client = connect(redis_url)
    yield Catalogue(Prefixes(client, uuid.uuid4().hex), fleet, block_size=BLOCK)
    await client.aclose()


def make(catalogue: Catalogue, prompts: Prompts) -> Declarations:
    async def records() -> list[ReplicaRecord]:
        return catalogue.records

    return Declarations(catalogue, PrefixComposer(prompts), records, block_size=BLOCK)


@pytest.fixture
def declarations(catalogue: Catalogue, prompts: Prompts) -> Declarations:
    return make(catalogue, prompts)


def see(fleet: Fleet, host: TierFacts | None = None, **warm: Mapping[str, Warm]) -> None:
    """There are these replicas, which keep that warm."""
    facts = {"pin_blocks": BUDGET, "host": host}
    fleet.update(
        record(id_, load=Load(features={"prefixes": encode(pins)}), **facts)
        for id_, pins in warm.items()
    )


def declaration(**fields: Any) -> PrefixDeclaration:
    return parse(PrefixDeclaration, json.dumps(fields).encode())


async def declare(
    declarations: Declarations, id_: str, tokens: int, **more: Any
) -> tuple[Any, bool]:
    wanted = declaration(id=id_, prompt=" a" * tokens, **more)
    return await declarations.declare(wanted, max_model_len=CONTEXT)


async def test_a_declaration_is_shown_as_it_stands(declarations: Declarations) -> None:
    shown, is_new = await declare(declarations, "law", 18, replicas=1)
    (holder,) = shown["assigned_to"]
    assert is_new
    assert holder in ("a", "b")
    assert shown == {
        "id": "law",
        "object": "prefix",
        "version": 1,
        "version_in_use": 1,
        "tokens": 18,
        "full_blocks": 4,
        "partial_tokens": 2,
        "shared": False,
        "replicas": 1,
        "assigned_to": [holder],
        "warm_on": [],
        "computed_tokens": 0,
        "pinned": True,
        "hits": 0,
        "tokens_saved": 0,
        "expires_at": None,
    }
    assert shown == await declarations.get("law")
    assert [shown] == await declarations.list()


async def test_a_prefix_without_a_full_block_is_declared_with_a_warning(
    declarations: Declarations,
) -> None:
    shown, _ = await declare(declarations, "law", BLOCK - 1)
    assert f"a block has {BLOCK}" in shown["warning"]
    shown, _ = await declare(declarations, "law", BLOCK)
    assert "warning" not in shown


async def test_what_is_warm_and_pinned_is_what_replicas_say(
    declarations: Declarations, fleet: Fleet
) -> None:
    await declare(declarations, "law", 18)
    see(fleet, a={"law@1": Warm(4, True)}, b={"law@1": Warm(3, True)})
    shown = await declarations.get("law")
    assert (shown["warm_on"], shown["pinned"]) == (["a"], True)


async def test_progress_is_the_tokens_that_replicas_have_computed(
    declarations: Declarations, catalogue: Catalogue, fleet: Fleet
) -> None:
    await declare(declarations, "law", 18)
    see(fleet, a={"law@1": Warm(4, True)}, b={})
    assert (await declarations.get("law"))["computed_tokens"] == 16
    prefix = await catalogue.named("task_id", "law")
    fleet.mirror.join("b")
    fleet.mirror.add("b", fleet.caches.chain(prefix.token_ids)[:2])
    assert (await declarations.get("law"))["computed_tokens"] == 16 + 8


async def test_what_is_not_pinned_is_warm_for_as_long_as_the_index_knows_it(
    declarations: Declarations, catalogue: Catalogue, fleet: Fleet
) -> None:
    await declare(declarations, "law", 18)
    see(fleet, a={"law@1": Warm(4, True)}, b={"law@1": Warm(4, False)})
    assert (await declarations.get("law"))["warm_on"] == ["a"]
    prefix = await catalogue.named("task_id", "law")
    fleet.mirror.join("b")
    fleet.mirror.add("b", fleet.caches.chain(prefix.token_ids))
    shown = await declarations.get("law")
    assert (sorted(shown["warm_on"]), shown["pinned"]) == (["a", "b"], False)
    fleet.mirror.join("b")
    assert (await declarations.get("law"))["warm_on"] == ["a"]


async def test_the_same_again_is_no_new_version(declarations: Declarations) -> None:
    await declare(declarations, "law", 40)
    shown, is_new = await declare(declarations, "law", 40, ttl_s=60)
    assert (is_new, shown["version"]) == (False, 1)
    assert shown["expires_at"] > 0


async def test_what_was_counted_is_shown(declarations: Declarations, catalogue: Catalogue) -> None:
    await declare(declarations, "law", 18)
    catalogue.count(await catalogue.named("task_id", "law"), cached_tokens=100)
    shown = await declarations.get("law")
    assert (shown["hits"], shown["tokens_saved"]) == (1, 16)


async def test_what_replicas_could_not_pin_is_refused_with_the_room_there_is(
    declarations: Declarations,
) -> None:
    await declare(declarations, "law", 6 * BLOCK)
    with pytest.raises(ApiError, match=r"needs 5 KV blocks.*has 4 of its 10") as refusal:
        await declare(declarations, "tax", 5 * BLOCK)
    assert (refusal.value.status, refusal.value.param) == (409, "pinned")
    assert [shown["id"] for shown in await declarations.list()] == ["law"]


async def test_the_longest_time_to_live_is_kept_and_a_longer_one_is_refused(
    declarations: Declarations,
) -> None:
    await declare(declarations, "law", 40, ttl_s=MAX_TTL_S)
    assert [shown["id"] for shown in await declarations.list()] == ["law"]
    with pytest.raises(ApiError, match=r"ttl_s is 1e\+300; expected seconds.*up to 1,000,000,000"):
        await declare(declarations, "tax", 40, ttl_s=1e300)


@pytest.mark.parametrize("tokens", [1, 20 * BLOCK])
async def test_a_pin_in_host_memory_is_refused_if_the_cluster_has_none(
    declarations: Declarations, tokens: int
) -> None:
    """A prefix shorter than a block is refused, too, although it needs no memory."""
    with pytest.raises(
        ApiError, match=r"keeps no cache there.*--host-cache-gb, or .*without --host"
    ) as refusal:
        await declare(declarations, "big", tokens, pinned="host")
    assert (refusal.value.status, refusal.value.code) == (409, "pin_budget_exceeded")


async def test_pins_in_host_memory_have_room_of_their_own(
    declarations: Declarations, catalogue: Catalogue, fleet: Fleet
) -> None:
    see(fleet, host=TierFacts(100, 1000, 1e9, pin_blocks=30), a={}, b={})
    await declare(declarations, "law", 10 * BLOCK)
    await declare(declarations, "big", 20 * BLOCK, pinned="host")
    with pytest.raises(ApiError, match=r"needs 11 KV blocks.*has 10 of its 30"):
        await declare(declarations, "tax", 11 * BLOCK, pinned="host")
    with pytest.raises(ApiError, match=r"needs 1 KV blocks.*has 0 of its 10"):
        await declare(declarations, "tea", BLOCK)


async def test_what_is_pinned_in_host_memory_is_warm_where_either_memory_has_it(
    declarations: Declarations, catalogue: Catalogue, fleet: Fleet
) -> None:
    host = TierFacts(100, 1000, 1e9, pin_blocks=30)
    pinned = {"law@1": Warm(4, is_pinned=True, is_in_host=True)}
    see(fleet, host=host, a=pinned, b={"law@1": Warm(4, is_pinned=False)})
    await declare(declarations, "law", 18, pinned="host")
    assert (await declarations.get("law"))["warm_on"] == []
    prefix = await catalogue.named("task_id", "law")
    fleet.mirror.join("a")
    fleet.mirror.add("a", map(HOST.fingerprint, fleet.caches.chain(prefix.token_ids)))
    shown = await declarations.get("law")
    assert (shown["warm_on"], shown["pinned"]) == (["a"], "host")
    fleet.mirror.join("b")
    fleet.mirror.add("b", fleet.caches.chain(prefix.token_ids))
    shown = await declarations.get("law")
    assert (sorted(shown["warm_on"]), shown["pinned"]) == (["a", "b"], False)


async def test_the_caller_may_do_without_the_pin(declarations: Declarations) -> None:
    await declare(declarations, "law", 6 * BLOCK)
    await declare(declarations, "tax", 40 * BLOCK, pinned=False)
    shown, _ = await declare(declarations, "tea", 4 * BLOCK)
    assert shown["full_blocks"] == 4


async def test_an_update_needs_room_beside_the_version_before(declarations: Declarations) -> None:
    await declare(declarations, "law", 6 * BLOCK)
    with pytest.raises(ApiError, match="has 4 of its 10"):
        await declare(declarations, "law", 7 * BLOCK)
    shown, is_new = await declare(declarations, "law", 4 * BLOCK)
    assert (is_new, shown["version"]) == (True, 2)


async def test_replicas_that_are_not_meant_need_no_room(declarations: Declarations) -> None:
    full = (await declare(declarations, "law", 10 * BLOCK, replicas=1))[0]["assigned_to"]
    accepted = []
    for number in range(32):
        with contextlib.suppress(ApiError):
            shown, _ = await declare(declarations, f"tea {number}", 1 * BLOCK, replicas=1)
            accepted.append(shown["assigned_to"])
    assert len(accepted) == BUDGET
    assert full not in accepted


async def test_a_dropped_prefix_is_gone_and_so_is_what_it_took(declarations: Declarations) -> None:
    await declare(declarations, "law", 10 * BLOCK)
    assert (await declarations.drop("law"))["deleted"]
    assert (await declare(declarations, "tax", 10 * BLOCK))[1]
    for attempt in (declarations.get("law"), declarations.drop("law")):
        with pytest.raises(ApiError) as refusal:
            await attempt
        assert refusal.value.status == 404


async def test_there_are_only_so_many(
    declarations: Declarations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.declarations.MAX_PREFIXES", 2)
    for id_ in ("law", "tax"):
        await declare(declarations, id_, 1)
    with pytest.raises(ApiError, match="exceed the limit of 2 prefixes") as refusal:
        await declare(declarations, "tea", 1)
    assert refusal.value.status == 409


async def test_a_prefix_longer_than_the_context_is_refused(declarations: Declarations) -> None:
    with pytest.raises(ApiError, match="this prefix has 200") as refusal:
        await declare(declarations, "law", CONTEXT)
    assert refusal.value.status == 400


async def test_without_redis_nothing_is_declared(catalogue: Catalogue, prompts: Prompts) -> None:
    away = Prefixes(connect("redis://127.0.0.1:1"), "m")
    catalogue = Catalogue(away, catalogue._fleet, block_size=BLOCK)
    declarations = make(catalogue, prompts)
    assert await declarations.list() == []
    for attempt in (declare(declarations, "law", 1), declarations.drop("law")):
        with pytest.raises(ApiError, match="Redis is away") as refusal:
            await attempt
        assert refusal.value.status == 503


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "id"),
        ({"id": ""}, "id"),
        ({"id": True}, "id"),
        ({"id": "x" * 129}, "id"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"messages": []}, "messages"),
        ({"replicas": 0}, "replicas"),
        ({"replicas": "some"}, "replicas"),
        ({"ttl_s": 0}, "ttl_s"),
        ({"pinned": "yes"}, "pinned"),
    ],
)
def test_a_bad_declaration_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], param: str
) -> None:
    good = {"id": "law"} if fields else {}
    if not {"prompt", "messages"} & set(fields):
        good["prompt"] = "You are a lawyer."
    with pytest.raises(ApiError, match="expected") as refusal:
        declaration(**{**good, **fields})
    assert (refusal.value.status, refusal.value.param) == (400, param)


async def declare_as(
    declarations: Declarations, caller: Caller, name: str, text: str, **more: object
) -> None:
    wanted = declaration(id=name, prompt=text, pinned=False, **more)
    await declarations.declare(wanted, caller, max_model_len=CONTEXT)


async def refused(work: object) -> tuple[int, str]:
    with pytest.raises(ApiError) as caught:
        await work  # type: ignore[misc]
    return caught.value.status, str(caught.value)


async def test_tenants_give_equal_names_to_different_prefixes(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "law", " a" * 20)
    await declare_as(declarations, B, "law", " b" * 30)
    await declare_as(declarations, B, "tax", " b" * 10)
    found = [await catalogue.named("prefix_id", "law", caller) for caller in (A, B)]
    assert [len(prefix.token_ids) for prefix in found] == [20, 30]
    assert [prefix.namespace for prefix in found] == [A.salt, B.salt]
    assert [each["id"] for each in await declarations.list(A)] == ["law"]
    assert [each["id"] for each in await declarations.list(B)] == ["law", "tax"]


async def test_a_figure_shows_what_all_prefixes_saved_and_names_none_of_a_tenant(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    for id_ in ("law", "tax", "old"):
        await declare(declarations, id_, 10)
    await declare_as(declarations, A, "own", " a" * 10)
    catalogue.count(await catalogue.named("prefix_id", "tax"), 4)
    (figure,) = await declarations.figures()
    assert figure.value == "4 tokens"
    assert figure.note.startswith("in 1 prompt; 4 declared, not warm on all replicas: ")
    assert "own" not in figure.note


async def test_nobody_learns_of_a_name_that_another_tenant_has_given(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "merger-2027", " a" * 20)
    for work in (
        catalogue.named("prefix_id", "merger-2026", B),
        catalogue.named("prefix_id", "merger-2027", B),
        declarations.get("merger-2027", B),
        declarations.drop("merger-2027", B),
    ):
        status, message = await refused(work)
        assert status == 404
        assert "did you mean" not in message
    assert (await catalogue.named("prefix_id", "merger-2027", A)).tenant == "a"
    await declarations.drop("merger-2027", A)
    assert await declarations.list(A) == []


async def test_no_name_reaches_another_tenants_prefix(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "merger", " a" * 20)
    assert (await refused(declarations.get(f"a{TENANT_SEPARATOR}merger", B)))[0] == 404
    assert (await refused(declarations.drop(f"a{TENANT_SEPARATOR}merger", B)))[0] == 404
    assert catalogue.find(f"a{TENANT_SEPARATOR}merger", B) is None


async def test_metrics_do_not_name_what_tenants_have_declared(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "merger", " a" * 20)
    await declare_as(declarations, A, "rules", " a" * 20, shared=True)
    assert catalogue.saved_tokens().keys() == {"rules"}


async def test_an_expired_prefix_is_shared_no_more(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "rules", " a" * 20, shared=True, ttl_s=600)
    text = np.append((await catalogue.named("prefix_id", "rules", B)).token_ids, np.uint32(1))
    assert catalogue.shared_tokens(text) == 20
    await declare_as(declarations, A, "rules", " a" * 20, shared=True, ttl_s=0.2)
    await until(lambda: catalogue.shared_tokens(text) == 0)


async def test_a_shared_prefix_is_everybodys_to_use_and_its_tenants_to_change(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    await declare_as(declarations, A, "rules", " a" * 20, shared=True)
    assert [each["shared"] for each in await declarations.list(B)] == [True]
    assert (await catalogue.named("prefix_id", "rules", B)).namespace == ""
    for work in (
        declare_as(declarations, B, "rules", " b" * 20, shared=True),
        declarations.drop("rules", B),
    ):
        assert await refused(work) == (
            403,
            "prefix 'rules' is shared by another tenant, and only that tenant can change it; use "
            "another name",
        )
    await declare_as(declarations, B, "rules", " b" * 30)
    assert len((await catalogue.named("prefix_id", "rules", B)).token_ids) == 30
    assert len((await catalogue.named("prefix_id", "rules", A)).token_ids) == 20
    await declarations.drop("rules", A)
    assert [each["shared"] for each in await declarations.list(B)] == [False]


async def test_a_prompt_shares_the_longest_declared_beginning_in_whole_blocks(
    declarations: Declarations, catalogue: Catalogue
) -> None:
    assert catalogue.shared_tokens(np.zeros(100, np.uint32)) == 0
    await declare_as(declarations, A, "short", " a" * 9, shared=True)
    await declare_as(declarations, A, "long", " a" * 18, shared=True)
    await declare_as(declarations, B, "own", " a" * 40)
    long = (await catalogue.named("prefix_id", "long", B)).token_ids
    for tokens, shared in ((7, 0), (8, 8), (15, 8), (16, 16), (18, 16)):
        assert catalogue.shared_tokens(long[:tokens]) == shared
    assert catalogue.shared_tokens(np.append(long[:9], np.zeros(20, np.uint32))) == 8


async def test_a_tenants_own_prefix_is_warm_where_its_own_blocks_are(
    declarations: Declarations, catalogue: Catalogue, fleet: Fleet
) -> None:
    """Its beginning is shared: there its blocks are everybody's."""
    await declare_as(declarations, A, "rules", " a" * 8, shared=True)
    await declare_as(declarations, B, "own", " a" * 16)
    own = await catalogue.named("prefix_id", "own", B)
    assert catalogue.holders(own.token_ids, own.namespace) == set()
    one_more = np.append(own.token_ids, own.token_ids[:1])
    for replica_id in "ab":
        fleet.mirror.join(replica_id)
    fleet.mirror.add("a", fleet.caches.chain(one_more, Scope("", B.salt, 2 * BLOCK)))
    fleet.mirror.add("b", fleet.caches.chain(one_more, Scope("", B.salt)))
    assert catalogue.holders(own.token_ids, own.namespace) == {"a"}
