"""Accounts on a real Redis: what was used counts once, on its day, however often it is sent."""

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvroute.contract.unreadable import Unreadable
from kvroute.features.keys.accounting import daily_accounts as stored
from kvroute.features.keys.accounting.daily_accounts import KEPT_DAYS, DailyAccounts, encode
from kvroute.features.keys.accounting.lasting_accounts import DAY_S, LastingAccounts
from kvroute.features.keys.accounting.tenant_routes import routes
from kvroute.features.keys.key_file import new_file, write
from kvroute.features.keys.key_gate import KeyGate
from kvroute.features.keys.limits import OTHER
from kvroute.router.api.errors import ApiError
from kvroute.router.application import _refuse
from kvroute.store.connection import connect
from kvroute.store.keys import key_prefix

TODAY = datetime.date.today()
KEY = f"{key_prefix('default', 'm')}:accounts:{TODAY.isoformat()}"
NAMES = st.sampled_from(["ok", "hit", "output_tokens", "decode_us"])
USED = st.tuples(
    st.sampled_from(["a", "b", OTHER, "ä@b.c"]), st.dictionaries(NAMES, st.integers(1, 2**40))
)


class LosesAnswers(DailyAccounts):
    """Redis gets some batches, and their senders hear nothing. lost: which, in turn."""

    lost: list[str]  # "batch", "answer" or ""

    async def add(self, day: datetime.date, router_id: str, number: int, batch: bytes) -> None:
        fate = self.lost.pop(0) if self.lost else ""
        if fate != "batch":
            await super().add(day, router_id, number, batch)
        if fate:
            raise TimeoutError


class Clock:
    """Of a router, at some time today."""

    def __init__(self) -> None:
        self.now_s = (TODAY - datetime.date(1970, 1, 1)).days * DAY_S + 80_000.0

    def __call__(self) -> float:
        return self.now_s


async def add(store: DailyAccounts, number: int, *, router: str = "r", **used: Any) -> None:
    await store.add(TODAY, router, number, encode(used))


async def test_batches_of_all_routers_add_up(empty_redis: Redis) -> None:
    store = DailyAccounts(empty_redis, "m")
    await add(store, 1, a={"ok": 1, "hit": 5}, b={"ok": 1})
    await add(store, 1, router="other", a={"ok": 2, "new": 7})
    await add(store, 2, a={"hit": 2**40})
    assert await store.read(TODAY) == {"a": {"ok": 3, "hit": 5 + 2**40, "new": 7}, "b": {"ok": 1}}


async def test_a_batch_that_comes_again_counts_once(empty_redis: Redis) -> None:
    store = DailyAccounts(empty_redis, "m")
    for number in (1, 1, 2, 1, 2):
        await add(store, number, a={"ok": 1})
    assert await store.read(TODAY) == {"a": {"ok": 2}}


async def test_a_day_is_kept_for_so_long(empty_redis: Redis) -> None:
    await add(DailyAccounts(empty_redis, "m"), 1, a={"ok": 1})
    left_s = await empty_redis.ttl(KEY)
    days = KEPT_DAYS - (datetime.date.today() - TODAY).days  # the run may go on past midnight
    assert days * DAY_S < left_s <= (days + 2) * DAY_S


async def test_models_and_clusters_have_accounts_of_their_own(empty_redis: Redis) -> None:
    await add(DailyAccounts(empty_redis, "m"), 1, a={"ok": 1})
    assert await DailyAccounts(empty_redis, "n").read(TODAY) == {}
    assert await DailyAccounts(empty_redis, "m", cluster="c").read(TODAY) == {}
    assert await DailyAccounts(empty_redis, "m").read(TODAY - datetime.timedelta(1)) == {}


async def test_only_so_many_tenants_have_names(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_TENANTS", 3)
    store = DailyAccounts(empty_redis, "m")
    await add(store, 1, other={"ok": 1})
    for number, tenant in enumerate("abcdea", 2):
        await store.add(TODAY, "r", number, encode({tenant: {"ok": 1}}))
    one = {"ok": 1}
    assert await store.read(TODAY) == {"a": {"ok": 2}, "b": one, "c": one, OTHER: {"ok": 3}}


@pytest.mark.parametrize("foreign", [b"", b"\xc1", b"no", msgspec.msgpack.encode({"ok": -1})])
async def test_what_cannot_be_read_is_left_out_and_told(empty_redis: Any, foreign: bytes) -> None:
    unreadable = Unreadable()
    store = DailyAccounts(empty_redis, "m", unreadable=unreadable)
    await add(store, 1, a={"ok": 1})
    await empty_redis.hset(KEY, "tb", foreign)
    await empty_redis.hset(KEY, b"t\xff", b"\x80")
    assert await store.read(TODAY) == {"a": {"ok": 1}}
    assert unreadable.counts["account"] == 2


async def test_what_others_wrote_stops_nobody(empty_redis: Any) -> None:
    store = DailyAccounts(empty_redis, "m")
    await empty_redis.set(KEY, "mine")
    assert await store.read(TODAY) == {}
    await add(store, 1, a={"ok": 1})
    await empty_redis.hset(KEY, mapping={"ta": "garbage", "n": "many", "rr": "x"})
    await add(store, 2, a={"ok": 1})
    assert await store.read(TODAY) == {"a": {"ok": 1}}


@given(st.lists(st.tuples(USED, st.sampled_from(["", "", "batch", "answer"])), max_size=12))
@settings(suppress_health_check=list(HealthCheck))
async def test_lost_batches_and_answers_change_no_sum(
    empty_redis: Redis, used: Sequence[tuple[tuple[str, dict[str, int]], str]]
) -> None:
    await empty_redis.flushall()
    store = LosesAnswers(empty_redis, "m")
    store.lost = [fate for _, fate in used]
    lasting = LastingAccounts(store, "r", clock=Clock())
    expected: dict[str, dict[str, int]] = {}
    for (tenant, account), _ in used:
        lasting.add(tenant, account)
        sums = expected.setdefault(tenant, {})
        for name, count in account.items():
            sums[name] = sums.get(name, 0) + count
        await lasting.close()
    while store.lost:
        await lasting.close()
    await lasting.flush()
    assert await lasting.sum_of_days([TODAY]) == {
        name: sums for name, sums in expected.items() if sums
    }


async def test_two_flushes_at_once_count_once(empty_redis: Redis) -> None:
    lasting = LastingAccounts(DailyAccounts(empty_redis, "m"), "r", clock=Clock())
    for _ in range(20):
        lasting.add("a", {"ok": 1})
        await asyncio.gather(*(lasting.flush() for _ in range(3)))
    assert await lasting.sum_of_days([TODAY]) == {"a": {"ok": 20}}


async def test_each_day_has_what_ended_then(empty_redis: Redis) -> None:
    clock = Clock()
    lasting = LastingAccounts(DailyAccounts(empty_redis, "m"), "r", clock=clock)
    lasting.add("a", {"ok": 1})
    clock.now_s += DAY_S
    lasting.add("a", {"ok": 5})
    await lasting.flush()
    tomorrow = TODAY + datetime.timedelta(1)
    assert await lasting.sum_of_days([TODAY]) == {"a": {"ok": 1}}
    assert await lasting.sum_of_days([tomorrow]) == {"a": {"ok": 5}}
    assert await lasting.sum_of_days([TODAY, tomorrow]) == {"a": {"ok": 6}}


async def test_what_was_used_waits_while_redis_is_away(empty_redis: Redis) -> None:
    away = DailyAccounts(connect("redis://127.0.0.1:1"), "m")
    lasting = LastingAccounts(away, "r", clock=Clock())
    for _ in range(3):
        lasting.add("a", {"ok": 1})
        await lasting.close()
        with pytest.raises((RedisError, OSError)):
            await lasting.sum_of_days([TODAY])
    lasting._store = DailyAccounts(empty_redis, "m")
    lasting.add("b", {"ok": 1})
    await lasting.flush()
    assert await lasting.sum_of_days([TODAY]) == {"a": {"ok": 3}, "b": {"ok": 1}}


def application(each: Mapping[str, LastingAccounts], folder: Path) -> httpx.AsyncClient:
    """A client of a router's routes. each: the accounts of each of its models."""
    write(folder / "keys.json", new_file())
    gate = KeyGate(folder / "keys.json")
    gate.accounts.update(each)
    models = {name: SimpleNamespace(name=name) for name in each}
    http: Any = FastAPI()
    http.state.gate = gate
    http.state.models = SimpleNamespace(all=[*models.values()], select=models.__getitem__)
    http.include_router(routes)
    http.exception_handler(ApiError)(_refuse)
    return httpx.AsyncClient(transport=httpx.ASGITransport(http), base_url="http://router")


async def test_clients_get_the_sums_of_some_days_for_each_model(
    empty_redis: Redis, tmp_path: Path
) -> None:
    each = {name: LastingAccounts(DailyAccounts(empty_redis, name), "r") for name in "mn"}
    for ago in range(3):
        day = TODAY - datetime.timedelta(ago)
        await each["m"]._store.add(day, "r", 1, encode({"a": {"ok": 1, "prefill_us": 500_000}}))
        await each["n"]._store.add(day, "r", 1, encode({"a": {"ok": 1, "decode_us": 2_000_000}}))
    period = {"since": str(TODAY - datetime.timedelta(1)), "until": str(TODAY)}
    async with application(each, tmp_path) as client:
        answer = (await client.get("/v1/cluster/tenants", params=period)).json()
        only = (await client.get("/v1/cluster/tenants", params=period | {"model": "m"})).json()
    assert (answer["since"], answer["until"]) == (period["since"], period["until"])
    assert [each["model"] for each in answer["data"]] == ["n", "m"], "who used most comes first"
    assert answer["data"][0]["gpu_seconds"] == {"prefill": 0.0, "decode": 4.0}
    assert [(each["model"], each["requests"]["ok"]) for each in only["data"]] == [("m", 2)]
    assert only["data"][0] == answer["data"][1]


async def test_clients_hear_of_wrong_days_and_of_a_redis_that_is_away(tmp_path: Path) -> None:
    away = LastingAccounts(DailyAccounts(connect("redis://127.0.0.1:1"), "m"), "r")
    async with application({"m": away}, tmp_path) as client:
        wrong = await client.get("/v1/cluster/tenants", params={"since": "today"})
        missing = await client.get("/v1/cluster/tenants")
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "since")
    assert missing.status_code == 503
    assert "Redis is away" in missing.json()["error"]["message"]
