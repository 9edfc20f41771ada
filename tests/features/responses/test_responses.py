"""Stored responses on a real Redis: a conversation is whole or not found, and the limit holds."""

import asyncio
import contextlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import RedisError

from kvroute.contract.unreadable import Unreadable
from kvroute.features.responses.stores.leased_values import (
    LARGEST_SHARE,
    MAX_REMOVED,
    OVERHEAD,
    TooLongError,
    key,
)
from kvroute.features.responses.stores.response_store import MAX_LINKS, Responses, StoredTurn
from kvroute.store.connection import connect
from kvroute.store.keys import key_prefix

MB = 1 << 20
AT_ONCE = 50  # calls of which even a busy machine answers each within its time limit
KEY = f"{key_prefix('default', 'm')}:responses"
ENDS = f"{KEY}:ends"
WAYS = settings(suppress_health_check=list(HealthCheck))


def store(client: Redis, **changes: Any) -> Responses:
    given: dict[str, Any] = {"model": "m", "unreadable": Unreadable(), "ttl_s": 60.0}
    return Responses(client, **{**given, "limit_bytes": MB, "max_bytes": MB, **changes})


def turn(*items: object) -> StoredTurn:
    return StoredTurn(msgspec.Raw(msgspec.json.encode(items)), len(items), len(items), len(items))


async def put(
    responses: Responses, id_: str, previous_id: str | None = None, *, salt: str = "", size: int = 1
) -> str:
    body = json.dumps({"id": id_, "text": "x" * size}).encode()
    return await responses.put(id_, salt, previous_id, turn(id_), body)


async def said(responses: Responses, id_: str, salt: str = "") -> list[str]:
    """The items of the conversation up to a response."""
    turns = await responses.conversation(id_, salt)
    return [item for each in turns for item in msgspec.json.decode(each.items)]


async def let_pass(client: Redis, seconds: int) -> None:
    """Everything in Redis is as if it were so much later."""
    ids: Any = await client.zrange(ENDS, 0, -1)
    for id_ in ids:
        await client.zincrby(ENDS, -1000 * seconds, id_)
    for each in (KEY, ENDS):
        await client.pexpire(each, await client.pttl(each) - 1000 * seconds)


async def counted(client: Any) -> tuple[int, int]:
    """The sum of all sizes as Redis has it, and as they are."""
    found = await client.hgetall(KEY)
    noted = int(found.pop(b"bytes", b"0"))
    members = await client.zrange(ENDS, 0, -1)
    return noted, sum(map(len, found.values())) + OVERHEAD * len(members)


async def test_a_conversation_is_read_from_its_beginning(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    await put(responses, "a")
    await put(responses, "b", "a")
    await put(responses, "c", "b")
    await put(responses, "other", "a")
    assert await said(responses, "c") == ["a", "b", "c"]
    assert await said(store(empty_redis), "other") == ["a", "other"]
    assert await said(responses, "unknown") == []


async def test_a_response_is_as_it_was_put(empty_redis: Redis) -> None:
    responses, body = store(empty_redis), json.dumps({"id": "a", "text": "你" * 100_000}).encode()
    assert await responses.put("a", "", None, turn("x"), body) == "stored"
    assert await responses.get("a", "") == body
    assert await responses.get("b", "") is None


async def test_another_salt_finds_nothing(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    await put(responses, "a", salt="mine")
    await put(responses, "b", "a", salt="yours")
    assert await said(responses, "a", "mine") == ["a"]
    for id_, salt in (("a", "yours"), ("a", ""), ("b", "yours"), ("b", "mine")):
        assert await said(responses, id_, salt) == []
        assert not await responses.delete("a", "yours")
    keys: Any = await empty_redis.hkeys(KEY)
    assert b"mine" not in b"".join(keys)


async def test_another_model_or_cluster_finds_nothing(empty_redis: Redis) -> None:
    await put(store(empty_redis), "a")
    assert await said(store(empty_redis, cluster="other"), "a") == []
    other = store(empty_redis, model="n")
    assert await other.get("a", "") is None


async def test_without_one_response_a_conversation_is_not_found(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    for id_, previous_id in (("a", None), ("b", "a"), ("c", "b")):
        await put(responses, id_, previous_id)
    assert await responses.delete("b", "")
    assert not await responses.delete("b", "")
    assert await said(responses, "c") == []
    assert await said(responses, "a") == ["a"]
    assert await responses.get("c", "") is not None


async def test_a_response_is_not_replaced(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    await put(responses, "a")
    assert await put(responses, "a", "a", size=5) == "known"
    assert await said(responses, "a") == ["a"]


async def test_a_conversation_without_a_beginning_ends(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    await put(responses, "a")
    await put(responses, "b", "a")
    await responses.delete("a", "")
    await put(responses, "a", "b")
    assert await said(responses, "a") == []


async def test_what_is_used_stays_and_the_rest_expires(empty_redis: Redis) -> None:
    responses = store(empty_redis, ttl_s=60.0)
    await put(responses, "a")
    await put(responses, "b", "a")
    await put(responses, "old")
    for _ in range(4):
        await let_pass(empty_redis, 24)
        assert await said(responses, "b") == ["a", "b"]
    assert await responses.get("old", "") is None
    await put(responses, "c")
    noted, found = await counted(empty_redis)
    assert noted == found
    assert await empty_redis.zcard(ENDS) == 3
    await let_pass(empty_redis, 61)
    assert await empty_redis.exists(KEY, ENDS) == 0


async def test_the_oldest_make_room(empty_redis: Redis) -> None:
    responses = store(empty_redis, limit_bytes=20 * (OVERHEAD + 150))
    for n in range(100):
        await put(responses, f"{n}", f"{n - 1}" if n % 2 else None)
        await responses.get("0", "")
        noted, found = await counted(empty_redis)
        assert noted == found == responses.bytes <= 20 * (OVERHEAD + 150)
    assert await said(responses, "99") == ["98", "99"]
    assert await said(responses, "0") == ["0"]
    assert await said(responses, "1") == []
    assert responses.evicted > 50


async def test_one_that_takes_too_much_is_not_stored(empty_redis: Redis) -> None:
    responses = store(empty_redis, limit_bytes=16 * 1000)
    await put(responses, "a")
    noise = "".join(chr(0x4E00 + n * n % 20_000) for n in range(2000))
    large = json.dumps({"text": noise}).encode()
    assert await responses.put("b", "", "a", turn(), large) == "too_large"
    assert responses.counts == {"stored": 1, "too_large": 1, "known": 0, "failed": 0}
    assert await said(responses, "a") == ["a"]


async def test_a_large_one_takes_the_room_of_many(empty_redis: Redis) -> None:
    small = 2 * MAX_REMOVED
    responses = store(empty_redis, limit_bytes=small * (OVERHEAD + 150))
    for first in range(0, small, AT_ONCE):
        await asyncio.gather(*(put(responses, f"{first + n}") for n in range(AT_ONCE)))
    filler = responses.bytes
    tight = store(empty_redis, limit_bytes=filler // 4)
    assert await put(tight, "last") == "stored"
    assert tight.bytes <= filler // 4
    noted, found = await counted(empty_redis)
    assert noted == found


async def test_a_conversation_has_a_limit(empty_redis: Redis) -> None:
    responses = store(empty_redis, max_bytes=5000, limit_bytes=100 * MB)
    for n in range(MAX_LINKS + 1):
        await put(responses, f"{n}", f"{n - 1}" if n else None)
    roomy = store(empty_redis, limit_bytes=100 * MB)
    assert len(await said(roomy, f"{MAX_LINKS - 1}")) == MAX_LINKS
    with pytest.raises(TooLongError):
        await roomy.conversation(f"{MAX_LINKS}", "")
    with pytest.raises(TooLongError):
        await responses.conversation("900", "")
    bomb = turn("x" * MB)
    await roomy.put("bomb", "", None, bomb, b"{}")
    with pytest.raises(TooLongError):
        await responses.conversation("bomb", "")


async def test_a_redis_without_memory_is_read_all_the_same(empty_redis: Redis) -> None:
    responses = store(empty_redis)
    await put(responses, "a")
    await empty_redis.config_set("maxmemory", "1")
    try:
        with pytest.raises(RedisError, match="OOM"):
            await put(responses, "b")
        assert await said(responses, "a") == ["a"]
        assert await responses.get("a", "") is not None
        noted, found = await counted(empty_redis)
        assert noted == found
    finally:
        await empty_redis.config_set("maxmemory", "0")


ids = st.sampled_from("abcdef")
acts = st.one_of(
    st.tuples(st.just("put"), ids, st.none() | ids, st.integers(0, 600)),
    st.tuples(st.just("get"), ids),
    st.tuples(st.just("delete"), ids),
    st.tuples(st.just("expire"), ids),
)


@dataclass
class Model:
    """What the store should do, in memory: id -> id before it, in the order of their use."""

    chains: dict[str, str | None] = field(default_factory=dict)

    def chain(self, id_: str) -> list[str]:
        found: list[str] = []
        here: str | None = id_
        while here is not None:
            if here in found or here not in self.chains:
                return []
            found.append(here)
            here = self.chains[here]
        return found[::-1]


@WAYS
@given(st.lists(acts, max_size=40))
def test_any_sequence_leaves_whole_conversations_and_exact_sizes(
    redis_url: str, sequence: list[tuple[Any, ...]]
) -> None:
    asyncio.run(_any_sequence(redis_url, sequence))


async def _any_sequence(url: str, sequence: Sequence[tuple[Any, ...]]) -> None:
    client: Any = connect(url)
    await client.flushall()
    limit = LARGEST_SHARE * (OVERHEAD + 170)
    responses, model = store(client, limit_bytes=limit), Model()
    try:
        for verb, id_, *rest in sequence:
            if verb == "put":
                if await put(responses, id_, rest[0], size=rest[1]) == "stored":
                    model.chains[id_] = rest[0]
            elif verb == "get":
                assert await said(responses, id_) == model.chain(id_)
            elif verb == "delete":
                assert await responses.delete(id_, "") == (id_ in model.chains)
                model.chains.pop(id_, None)
            else:
                await client.zadd(ENDS, {key(id_, ""): 1}, xx=True)
                model.chains.pop(id_, None)
            noted, found = await counted(client)
            assert noted == found <= limit
        for id_ in "abcdef":
            assert await said(responses, id_) == model.chain(id_)
    finally:
        await client.aclose()


A = key("a", "")
members = st.sampled_from([A, A + b"r", b"bytes", key("b", "")]) | st.binary(max_size=20)
rubbish = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=40).map(lambda data: bytes(16) + zlib.compress(data)),
    st.sampled_from(
        [
            bytes(16) + zlib.compress(b'{"version":2}'),
            bytes(16) + zlib.compress(b'{"items":{},"inputs":1,"count":1,"values":1,"version":1}'),
            zlib.compress(b"[]"),
            *(b"-1", b"nan", b"inf", b"1e300", b"9" * 30),
        ]
    ),
)
writes = st.one_of(
    st.tuples(st.just("hset"), st.just(KEY), members, rubbish),
    st.tuples(st.just("hdel"), st.just(KEY), members),
    st.tuples(
        st.just("zadd"),
        st.just(ENDS),
        st.dictionaries(members, st.floats(allow_nan=False), min_size=1),
    ),
    st.tuples(st.just("zrem"), st.just(ENDS), members),
    st.tuples(st.just("delete"), st.sampled_from([KEY, ENDS])),
    st.tuples(st.just("set"), st.sampled_from([KEY, ENDS]), rubbish),
)


@WAYS
@given(st.lists(writes, min_size=1, max_size=6))
def test_whatever_is_in_our_keys_nothing_is_raised(
    redis_url: str, others: list[tuple[Any, ...]]
) -> None:
    asyncio.run(_whatever(redis_url, others))


async def _whatever(url: str, others: Sequence[tuple[Any, ...]]) -> None:
    client: Any = connect(url)
    await client.flushall()
    unreadable = Unreadable()
    responses = store(client, unreadable=unreadable)
    try:
        await put(responses, "a")
        await put(responses, "b", "a")
        for verb, *arguments in others:
            with contextlib.suppress(RedisError):  # a key is of another type by now
                await getattr(client, verb)(*arguments)
        for id_ in "ab":
            turns = await responses.conversation(id_, "")
            assert len(turns) in (0, 1, 2)
            await responses.get(id_, "")
        await responses.delete("b", "")
        await put(responses, "c")
        assert await said(responses, "c") == ["c"]
    finally:
        await client.aclose()


async def test_what_cannot_be_read_is_counted(empty_redis: Redis) -> None:
    unreadable = Unreadable()
    responses = store(empty_redis, unreadable=unreadable)
    await put(responses, "a")
    await empty_redis.hset(KEY, key("a", ""), bytes(16) + zlib.compress(b'{"version":2}'))
    assert await said(responses, "a") == []
    assert unreadable.counts["response"] == 1
    assert "version is 2" in unreadable.last["response"].reason
