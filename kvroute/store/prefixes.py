"""Named prefixes are declared in Redis; every reader computes which replicas keep them warm.

Their keys have the same hash tag as the index's (index.py), but no lease:

    kvroute:{TAG}:prefixes           hash    ID@VERSION -> JSON of Terms
    kvroute:{TAG}:prefixes:tokens    hash    ID@VERSION -> u32-little-endian token ids
    kvroute:{TAG}:prefixes:versions  hash    id -> the last version, also of dropped prefixes
    kvroute:{TAG}:prefixes:hits      hash    id -> requests that found it cached
    kvroute:{TAG}:prefixes:saved     hash    id -> tokens that those requests reused
    kvroute:{TAG}:prefixes:revision  string  a new number after every change of the first three

Every change is one transaction that watches the revision. Unreadable entries are skipped and
counted.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
import redis.asyncio as redis
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvroute.contract.prefix_id import OF
from kvroute.contract.records import VERSION, AtLeastOne, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable, UnreadableError, text
from kvroute.store.connection import answered
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

TOKEN_BYTES = 4
NUMBER_DIGITS = 18
MAX_TENANT = 256  # characters of a tenant's name or salt


class OtherTenantError(Exception):
    """Another tenant has declared the prefix."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """One version of a named prefix; name and version determine the tokens."""

    id: str  # as clients name it, task_id 1 is "1"; a tenant's own: own_id
    version: int  # starts at 1; each new declaration of the id adds 1
    token_ids: NDArray[np.uint32] = field(compare=False, repr=False)  # shape (n,)
    source: Mapping[str, Any] = field(repr=False)  # {"prompt": str} or {"messages": [...]}
    replicas: int | None = None  # how many keep it warm; None: all
    is_pinned: bool = True  # False: warm, but it may be evicted
    expires_at_s: float | None = None  # unix time
    tenant: str = ""  # whose API key has declared it; empty: nobody's
    namespace: str = ""  # the caches that it is warm in: its tenant's; empty: of no namespace
    is_shared: bool = False  # all namespaces find its full blocks
    is_in_host: bool = False  # its pin is in host memory, and not in the engines' own

    @property
    def label(self) -> str:
        """As its tenant's clients name it."""
        return self.id.rpartition(OF)[2]

    @property
    def name(self) -> str:
        return f"{self.id}@{self.version}"

    def full_blocks(self, block_size: int) -> int:
        """The part that can be shared; every request computes the tokens after it."""
        return len(self.token_ids) // block_size

    def full_tokens(self, block_size: int) -> int:
        """Those of its full blocks."""
        return self.full_blocks(block_size) * block_size

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and self.expires_at_s <= now_s


class Message(msgspec.Struct):
    """The fields that every chat message has."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Source(msgspec.Struct):
    """The source of a declaration: one of these fields."""

    prompt: str | None = None
    messages: list[Message] | None = None


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration without its tokens."""

    order: Annotated[int, msgspec.Meta(ge=0, le=2**60)]  # among all declarations
    source: dict[str, Any]  # the fields of a Source, and others that it had
    replicas: AtLeastOne | None = None
    is_pinned: bool = True
    expires_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    namespace: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    is_shared: bool = False
    is_in_host: bool | msgspec.UnsetType = msgspec.UNSET  # left out where it is not
    version: int = VERSION


class Key(NamedTuple):
    """The parts of a prefix's name."""

    id: str
    version: int

    @classmethod
    def parse(cls, name: bytes) -> "Key":
        """Raises UnreadableError."""
        id_, _, version = text(name).rpartition("@")
        if not (id_ and version.isdecimal() and version.isascii() and len(version) < 10):
            raise UnreadableError("its name is not ID@VERSION")
        return cls(id_, int(version))


_terms = msgspec.json.Decoder(Terms)
_versions = msgspec.json.Decoder(Versioned)


def own_id(tenant: str, name: str) -> str:
    """The id of a prefix that only this tenant can use. Tenants can give equal names."""
    return f"{tenant}{OF}{name}"


def shared_tokens(token_ids: NDArray[np.uint32], shared: Iterable[Prefix], block_size: int) -> int:
    """How many of the first tokens, in whole blocks, are those of one of these prefixes."""
    longest, now_s = 0, time.time()
    for prefix in shared:
        full = prefix.full_tokens(block_size)
        is_longer = longest < full <= len(token_ids) and not prefix.is_expired(now_s)
        if is_longer and _begins(prefix.token_ids, token_ids, full):
            longest = full
    return longest


def _begins(ids: NDArray[np.uint32], others: NDArray[np.uint32], tokens: int) -> bool:
    """Whether the first `tokens` are equal. Most differ in the first or the last one: to compare
    all of a thousand prefixes would take milliseconds."""
    last = tokens - 1
    is_near = ids[0] == others[0] and ids[last] == others[last]
    return bool(is_near) and np.array_equal(ids[:tokens], others[:tokens])


def assigned(prefix: Prefix, replica_ids: Iterable[str]) -> list[str]:
    """The live replicas that keep the prefix warm (rendezvous hashing).

    Every process that knows the same replicas gets the same result. A replica that joins or leaves
    changes its own share only, and a new version stays where the old one is.
    """
    ranked = sorted(replica_ids, key=lambda replica_id: _rank(prefix.id, replica_id), reverse=True)
    if prefix.replicas is None:
        return ranked
    return ranked[: prefix.replicas]


class Prefixes:
    """The named prefixes of one model of one cluster.

    Any method raises RedisError or OSError when Redis is unreachable. No content of Redis makes it
    raise anything else.
    """

    def __init__(
        self,
        client: "redis.Redis",
        model: str,
        *,
        cluster: str = DEFAULT_CLUSTER,
        unreadable: Unreadable | None = None,
    ) -> None:
        self.unreadable = unreadable or Unreadable()
        self._redis: Any = client
        self._declared = f"{key_prefix(cluster, model)}:prefixes"
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
        tenant: str = "",
        namespace: str = "",
        is_shared: bool = False,
        is_in_host: bool = False,
    ) -> Prefix:
        """The id's next version. Repeating the latest declaration only updates its expiry.
        OtherTenantError."""

        async def change(pipe: Any) -> Prefix:
            last = await self._last_version(pipe, id)
            latest = await self._read(pipe, f"{id}@{last}")
            if latest is not None and tenant and latest.tenant not in ("", tenant):
                raise OtherTenantError(id)
            new = Prefix(
                *(id, last + 1, token_ids, source, replicas, is_pinned, expires_at_s),
                tenant=tenant,
                namespace=namespace,
                is_shared=is_shared,
                is_in_host=is_in_host,
            )
            if latest is not None and is_same(latest, new):
                new = replace(latest, expires_at_s=expires_at_s)
            await self._write(pipe, [new])
            return new

        prefix: Prefix = await self._transaction(change)
        return prefix

    @answered
    async def all(self) -> list[Prefix]:
        """Every version that is not dropped, oldest first. Drops the expired ones."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._declared)
        pipeline.hgetall(self._tokens)
        declared, tokens = await pipeline.execute()
        decoded = []
        for name, packed in declared.items():
            if (terms := self._terms(name, packed)) is not None:
                decoded.append((terms.order, name, terms))
        found = [self._prefix(name, terms, tokens.get(name)) for _, name, terms in sorted(decoded)]
        readable, now_s = [prefix for prefix in found if prefix is not None], time.time()
        if any(prefix.is_expired(now_s) for prefix in readable):
            await self._remove(lambda _, terms: terms is not None and _is_expired(terms, now_s))
        return [prefix for prefix in readable if not prefix.is_expired(now_s)]

    @answered
    async def drop(self, id: str) -> bool:  # noqa: A002
        """Removes all versions of the id and its counters; False when there was none."""
        return await self._remove(lambda key, _: key.id == id)

    @answered
    async def retire(self, id: str, version: int) -> None:  # noqa: A002
        """Removes this version; later ones stay."""
        await self._remove(lambda key, _: key == (id, version))

    @answered
    async def revision(self) -> int:
        """A new number after every change; 0 when Redis never had a prefix, or lost all data."""
        return _number(await self._redis.get(self._revision))

    @answered
    async def restore(self, prefixes: Sequence[Prefix]) -> None:
        """Writes the prefixes again, unless Redis has a revision: then it lost none."""

        async def change(pipe: Any) -> None:
            if not _number(await pipe.get(self._revision)):
                await self._write(pipe, prefixes)

        await self._transaction(change)

    @answered
    async def count(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """Adds to the counters. uses: id -> (hits, tokens saved); dropped ids are ignored."""

        async def change(pipe: Any) -> None:
            declared = uses.keys() & set(map(_id, await pipe.hkeys(self._declared)))
            garbage = [
                (key, id_)
                for key in (self._hits, self._saved)
                for id_ in declared
                if (n := await pipe.hget(key, id_)) is not None and not n.isdigit()
            ]
            pipe.multi()
            for key, id_ in garbage:
                pipe.hdel(key, id_)
            for id_ in declared:
                hits, tokens_saved = uses[id_]
                pipe.hincrby(self._hits, id_, hits)
                pipe.hincrby(self._saved, id_, tokens_saved)

        await self._transaction(change)

    @answered
    async def uses(self) -> Mapping[str, tuple[int, int]]:
        """id -> (hits, tokens saved) since its first declaration; ids without hits are missing."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._hits)
        pipeline.hgetall(self._saved)
        hits, saved = await pipeline.execute()
        return {
            id_.decode(errors="replace"): (_number(n), _number(saved.get(id_)))
            for id_, n in hits.items()
        }

    async def _transaction(self, change: Callable[[Any], Awaitable[Any]]) -> Any:
        return await self._redis.transaction(change, self._revision, value_from_callable=True)

    async def _read(self, pipe: Any, name: str) -> Prefix | None:
        packed, key = await pipe.hget(self._declared, name), name.encode()
        terms = None if packed is None else self._terms(key, packed)
        if terms is None:
            return None
        return self._prefix(key, terms, await pipe.hget(self._tokens, name))

    async def _last_version(self, pipe: Any, id_: str) -> int:
        """The id's last version; if the counter is unreadable, the highest declared one."""
        packed = await pipe.hget(self._versions, id_)
        if packed is None or _number(packed):
            return _number(packed)
        keys = [self._key(name) for name in await pipe.hkeys(self._declared)]
        return max((key.version for key in keys if key and key.id == id_), default=0)

    def _key(self, name: bytes) -> Key | None:
        """None when the name is unreadable."""
        try:
            return Key.parse(name)
        except UnreadableError as error:
            self.unreadable.add("prefix", name, error)
            return None

    def _terms(self, name: bytes, packed: bytes) -> Terms | None:
        """None when they are unreadable."""
        try:
            Key.parse(name)
            return _decode_terms(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add("prefix", name, error)
            return None

    def _prefix(self, name: bytes, terms: Terms, packed: bytes | None) -> Prefix | None:
        """None when its tokens are missing or unreadable."""
        if not packed or len(packed) % TOKEN_BYTES:
            self.unreadable.add("prefix", name, "it has no tokens, or not of 4 bytes each")
            return None
        id_, version = Key.parse(name)
        return Prefix(
            id_,
            version,
            np.frombuffer(packed, dtype="<u4").astype(np.uint32),
            terms.source,
            terms.replicas,
            terms.is_pinned,
            terms.expires_at_s,
            terms.tenant,
            terms.namespace,
            terms.is_shared,
            terms.is_in_host is True,
        )

    async def _write(self, pipe: Any, prefixes: Sequence[Prefix]) -> None:
        """Begins the transaction's writes; existing prefixes keep their order."""
        known = [await pipe.hget(self._declared, prefix.name) for prefix in prefixes]
        revision = await self._next_revision(pipe)
        pipe.multi()
        pipe.set(self._revision, revision + len(prefixes))
        for order, (prefix, packed) in enumerate(zip(prefixes, known, strict=True), revision):
            terms = packed and self._terms(prefix.name.encode(), packed)
            new_terms = _terms_of(prefix, order=terms.order if terms else order)
            pipe.hset(self._declared, prefix.name, encode(new_terms))
            pipe.hset(self._tokens, prefix.name, prefix.token_ids.astype("<u4").tobytes())
            pipe.hset(self._versions, prefix.id, prefix.version)

    async def _remove(self, is_removed: Callable[[Key, Terms | None], bool]) -> bool:
        """Removes the matching prefixes; False when there was none. Unreadable terms are None."""

        async def change(pipe: Any) -> bool:
            declared = await pipe.hgetall(self._declared)
            gone = [
                name
                for name, packed in declared.items()
                if (key := self._key(name)) and is_removed(key, self._terms(name, packed))
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
        """Starts at the current time: after a loss, Redis continues with new numbers."""
        revision = _number(await pipe.get(self._revision))
        return revision + 1 if revision else time.time_ns() // 1000


def _rank(prefix_id: str, replica_id: str) -> tuple[int, str]:
    return xxh3_64_intdigest(f"{prefix_id}\0{replica_id}".encode()), replica_id


DECLARED = ("source", "replicas", "is_pinned", "is_in_host", "tenant", "namespace", "is_shared")


def is_same(one: Prefix, other: Prefix) -> bool:
    """Whether two declarations are equal, apart from version and expiry."""
    return np.array_equal(one.token_ids, other.token_ids) and all(
        getattr(one, name) == getattr(other, name) for name in DECLARED
    )


def _terms_of(prefix: Prefix, *, order: int) -> Terms:
    return Terms(
        order=order,
        source=dict(prefix.source),
        replicas=prefix.replicas,
        is_pinned=prefix.is_pinned,
        expires_at_s=prefix.expires_at_s,
        tenant=prefix.tenant,
        namespace=prefix.namespace,
        is_shared=prefix.is_shared,
        is_in_host=prefix.is_in_host or msgspec.UNSET,
    )


def _decode_terms(packed: bytes) -> Terms:
    """Raises one of DECODE_ERRORS."""
    check_version(_versions, packed)
    terms = _terms.decode(packed)
    source = msgspec.convert(terms.source, Source)
    if (source.prompt is None) == (source.messages is None):
        raise UnreadableError("its source is neither a prompt nor messages")
    return terms


def _is_expired(terms: Terms, now_s: float) -> bool:
    return terms.expires_at_s is not None and terms.expires_at_s <= now_s


def _number(packed: bytes | None) -> int:
    """0 when the number is missing or unreadable."""
    return int(packed) if packed and packed.isdigit() and len(packed) <= NUMBER_DIGITS else 0


def _id(name: bytes) -> str:
    return name.decode(errors="replace").rsplit("@", 1)[0]
