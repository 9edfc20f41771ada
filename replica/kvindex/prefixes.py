"""What is declared to be kept warm, in Redis, and which replicas keep it.

Beside the index's own keys (index.py), with the same hash tag but without a lease:

    kvroute:{model}:prefixes           hash    ID@VERSION -> JSON: what was declared, but its tokens
    kvroute:{model}:prefixes:tokens    hash    ID@VERSION -> u32-little-endian token ids
    kvroute:{model}:prefixes:versions  hash    id -> the last version, also of dropped prefixes
    kvroute:{model}:prefixes:hits      hash    id -> requests that found it cached
    kvroute:{model}:prefixes:saved     hash    id -> tokens that they did not compute
    kvroute:{model}:prefixes:revision  string  another number after every change of the first three

Every change is one transaction that watches the revision.
"""

import json
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import redis.asyncio as redis
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from replica.kvindex.index import answered, key_prefix


@dataclass(frozen=True, slots=True)
class Prefix:
    """One version of a named prefix; name and version determine the tokens."""

    id: str  # as clients name it; task_id 1 is "1"
    version: int  # 1, and one more for each new declaration of the id
    token_ids: NDArray[np.uint32] = field(compare=False, repr=False)  # shape (n,)
    source: Mapping[str, Any] = field(repr=False)  # {"prompt": str} or {"messages": [...]}
    replicas: int | None = None  # how many keep it warm; None: all
    is_pinned: bool = True  # False: warm, but it may be evicted
    expires_at_s: float | None = None  # unix time
    extra_replicas: int = 0  # that keep it warm besides, for demand

    @property
    def name(self) -> str:
        return f"{self.id}@{self.version}"

    def full_blocks(self, block_size: int) -> int:
        """What of it can be shared; the tokens after them are computed by every request."""
        return len(self.token_ids) // block_size

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and self.expires_at_s <= now_s


def assigned(prefix: Prefix, replica_ids: Iterable[str]) -> list[str]:
    """Those of the living replicas that keep the prefix warm.

    Whoever knows the same replicas finds the same ones. One that comes or goes moves its own share
    only, and a new version stays where the old one is.
    """
    ranked = sorted(replica_ids, key=lambda replica_id: _rank(prefix.id, replica_id), reverse=True)
    if prefix.replicas is None:
        return ranked
    return ranked[: prefix.replicas + prefix.extra_replicas]


class Prefixes:
    """The named prefixes of one model. Any method raises RedisError or OSError when Redis is
    away."""

    def __init__(self, client: "redis.Redis", model: str) -> None:
        self._redis: Any = client
        self._declared = f"{key_prefix(model)}:prefixes"
        self._tokens = f"{self._declared}:tokens"
        self._versions = f"{self._declared}:versions"
        self._hits = f"{self._declared}:hits"
        self._saved = f"{self._declared}:saved"
        self._revision = f"{self._declared}:revision"

    @answered
    async def declare(
        self,
        id: str,  # noqa: A002  # as in Prefix
        *,
        token_ids: NDArray[np.uint32],
        source: Mapping[str, Any],
        replicas: int | None = None,
        is_pinned: bool = True,
        expires_at_s: float | None = None,
    ) -> Prefix:
        """The id's next version. One that is declared again as it is only gets its new expiry."""

        async def change(pipe: Any) -> Prefix:
            last = int(await pipe.hget(self._versions, id) or 0)
            latest = await self._read(pipe, f"{id}@{last}")
            new = Prefix(id, last + 1, token_ids, source, replicas, is_pinned, expires_at_s)
            if latest is not None and is_same(latest, new):
                new = replace(latest, expires_at_s=expires_at_s)
            await self._write(pipe, [new])
            return new

        prefix: Prefix = await self._transaction(change)
        return prefix

    @answered
    async def all(self) -> list[Prefix]:
        """Every version that is not dropped, oldest first. Those that expired are, by this."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._declared)
        pipeline.hgetall(self._tokens)
        declared, tokens = await pipeline.execute()
        stated = [(name.decode(), json.loads(terms)) for name, terms in declared.items()]
        stated.sort(key=lambda item: item[1]["order"])
        found = [_prefix(name, terms, tokens[name.encode()]) for name, terms in stated]
        now_s = time.time()
        expired = [prefix for prefix in found if prefix.is_expired(now_s)]
        if expired:
            await self._remove(lambda prefix: prefix.is_expired(now_s))
        return [prefix for prefix in found if prefix not in expired]

    @answered
    async def drop(self, id: str) -> bool:  # noqa: A002
        """No version of it is left, nor what was counted of it; False when there was none."""
        return await self._remove(lambda prefix: prefix.id == id)

    @answered
    async def retire(self, id: str, version: int) -> None:  # noqa: A002
        """This version is gone; later ones stay."""
        await self._remove(lambda prefix: (prefix.id, prefix.version) == (id, version))

    @answered
    async def set_extra(self, id: str, version: int, extra_replicas: int) -> None:  # noqa: A002
        """Nothing happens where the version is gone, or has that many already."""

        async def change(pipe: Any) -> None:
            prefix = await self._read(pipe, f"{id}@{version}")
            if prefix is not None and prefix.extra_replicas != extra_replicas:
                await self._write(pipe, [replace(prefix, extra_replicas=extra_replicas)])

        await self._transaction(change)

    @answered
    async def revision(self) -> int:
        """Another number after every change; 0 when Redis has never heard of a prefix, or lost
        all that it had."""
        return int(await self._redis.get(self._revision) or 0)

    @answered
    async def restore(self, prefixes: Sequence[Prefix]) -> None:
        """Redis has them, as they were, unless it has a revision: then it lost none."""

        async def change(pipe: Any) -> None:
            if not await pipe.exists(self._revision):
                await self._write(pipe, prefixes)

        await self._transaction(change)

    @answered
    async def count(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """uses: of each id, hits and tokens saved, which are added up. Dropped ids count none."""

        async def change(pipe: Any) -> None:
            living = {_id(name) for name in await pipe.hkeys(self._declared)}
            pipe.multi()
            for id_, (hits, tokens_saved) in uses.items():
                if id_ in living:
                    pipe.hincrby(self._hits, id_, hits)
                    pipe.hincrby(self._saved, id_, tokens_saved)

        await self._transaction(change)

    @answered
    async def uses(self) -> Mapping[str, tuple[int, int]]:
        """Of each id that was used: hits and tokens saved, since it was first declared."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._hits)
        pipeline.hgetall(self._saved)
        hits, saved = await pipeline.execute()
        return {id_.decode(): (int(n), int(saved[id_])) for id_, n in hits.items()}

    async def _transaction(self, change: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self._redis.transaction(change, self._revision, value_from_callable=True)

    async def _read(self, pipe: Any, name: str) -> Prefix | None:
        terms = await pipe.hget(self._declared, name)
        if terms is None:
            return None
        return _prefix(name, json.loads(terms), await pipe.hget(self._tokens, name))

    async def _write(self, pipe: Any, prefixes: Sequence[Prefix]) -> None:
        """Begins the transaction's writes; prefixes that are there keep their place."""
        known = [await pipe.hget(self._declared, prefix.name) for prefix in prefixes]
        revision = await self._next_revision(pipe)
        pipe.multi()
        pipe.set(self._revision, revision + len(prefixes))
        for order, (prefix, terms) in enumerate(zip(prefixes, known, strict=True), revision):
            place = order if terms is None else json.loads(terms)["order"]
            pipe.hset(self._declared, prefix.name, json.dumps(_terms(prefix) | {"order": place}))
            pipe.hset(self._tokens, prefix.name, prefix.token_ids.astype("<u4").tobytes())
            pipe.hset(self._versions, prefix.id, prefix.version)

    async def _remove(self, is_removed: Callable[[Prefix], bool]) -> bool:
        """Whether there was one of these."""

        async def change(pipe: Any) -> bool:
            declared = await pipe.hgetall(self._declared)
            gone = [
                name
                for name, terms in declared.items()
                if is_removed(_prefix(name.decode(), json.loads(terms), b""))
            ]
            if not gone:
                return False
            unused = {_id(name) for name in gone} - {_id(name) for name in declared.keys() - gone}
            revision = await self._next_revision(pipe)
            pipe.multi()
            pipe.set(self._revision, revision)
            pipe.hdel(self._declared, *gone)
            pipe.hdel(self._tokens, *gone)
            if unused:
                pipe.hdel(self._hits, *unused)
                pipe.hdel(self._saved, *unused)
            return True

        return bool(await self._transaction(change))

    async def _next_revision(self, pipe: Any) -> int:
        """Counted from the time of the first one: a Redis that lost all goes on with others."""
        revision = int(await pipe.get(self._revision) or 0)
        return revision + 1 if revision else time.time_ns() // 1000


def _rank(prefix_id: str, replica_id: str) -> tuple[int, str]:
    return xxh3_64_intdigest(f"{prefix_id}\0{replica_id}".encode()), replica_id


def is_same(one: Prefix, other: Prefix) -> bool:
    """Whether they are the same declaration, whatever their versions, expiries and demand."""
    return np.array_equal(one.token_ids, other.token_ids) and all(
        getattr(one, name) == getattr(other, name) for name in ("source", "replicas", "is_pinned")
    )


def _terms(prefix: Prefix) -> dict[str, Any]:
    names = ("source", "replicas", "is_pinned", "expires_at_s", "extra_replicas")
    return {name: getattr(prefix, name) for name in names}


def _prefix(name: str, terms: Mapping[str, Any], packed: bytes) -> Prefix:
    id_, version = name.rsplit("@", 1)
    declared = {key: value for key, value in terms.items() if key != "order"}
    token_ids = np.frombuffer(packed, dtype="<u4").astype(np.uint32)
    return Prefix(id_, int(version), token_ids, **declared)


def _id(name: bytes) -> str:
    return name.decode().rsplit("@", 1)[0]
