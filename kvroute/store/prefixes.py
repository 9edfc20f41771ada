"""Named prefixes in Redis. Every reader computes which replicas keep them warm.

Their keys have the same hash tag as the index (index.py), but no lease:

    kvroute:{TAG}:prefixes           hash    ID@VERSION -> JSON of Terms
    kvroute:{TAG}:prefixes:tokens    hash    ID@VERSION -> u32-little-endian token ids
    kvroute:{TAG}:prefixes:versions  hash    id -> the last version, also of dropped prefixes
    kvroute:{TAG}:prefixes:hits      hash    id -> number of requests with a cache hit on it
    kvroute:{TAG}:prefixes:saved     hash    id -> tokens that these requests reused
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

from kvroute.blocks.tiers import GPU, HOST, Tier
from kvroute.contract.prefix_id import TENANT_SEPARATOR
from kvroute.contract.records import VERSION, AtLeastOne, Versioned, check_version, encode
from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable, UnreadableError, text
from kvroute.store.connection import with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

TOKEN_BYTES = 4  # bytes of one token id
NUMBER_DIGITS = 18  # most digits of a number; longer numbers are unreadable
MAX_TENANT = 256  # most characters of a tenant's name or salt


class OtherTenantError(Exception):
    """Another tenant has declared the prefix."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """One version of a named prefix; its id and version determine the tokens."""

    id: str  # the id that clients send (task_id 1 is "1"), or own_id() for a tenant's own prefix
    version: int  # starts at 1; each new declaration of the id adds 1
    token_ids: NDArray[np.uint32] = field(compare=False, repr=False)  # shape (n,)
    source: Mapping[str, Any] = field(repr=False)  # {"prompt": str} or {"messages": [...]}
    replicas: int | None = None  # how many replicas keep it warm; None: all
    is_pinned: bool = True  # False: replicas compute it, but may evict it
    expires_at_s: float | None = None  # Unix time; None: never
    tenant: str = ""  # the tenant whose API key declared it; empty: declared without a key
    namespace: str = ""  # cache salt of its tenant, whose requests reuse it; empty: no salt
    is_shared: bool = False  # True: requests of all namespaces reuse its full blocks
    is_in_host: bool = False  # True: it is pinned in host memory, not in the engines' own

    @property
    def tier(self) -> Tier:
        """Return the tier in which replicas pin it."""
        return HOST if self.is_in_host else GPU

    @property
    def label(self) -> str:
        """Return the name that its tenant's clients use."""
        return self.id.rpartition(TENANT_SEPARATOR)[2]

    @property
    def name(self) -> str:
        return f"{self.id}@{self.version}"

    def full_blocks(self, block_size: int) -> int:
        """Return its number of full blocks; every request computes the tokens after them."""
        return len(self.token_ids) // block_size

    def full_tokens(self, block_size: int) -> int:
        """Return the number of tokens in its full blocks."""
        return self.full_blocks(block_size) * block_size

    def is_expired(self, now_s: float) -> bool:
        return self.expires_at_s is not None and self.expires_at_s <= now_s


class PrefixMessage(msgspec.Struct):
    """The fields that every chat message has."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str


class Source(msgspec.Struct):
    """The source of a declaration: exactly one of these fields."""

    prompt: str | None = None
    messages: list[PrefixMessage] | None = None


class PrefixTerms(msgspec.Struct, frozen=True, kw_only=True):
    """A declaration without its tokens."""

    order: Annotated[int, msgspec.Meta(ge=0, le=2**60)]  # position among all declarations
    source: dict[str, Any]  # the fields of a Source, and any others that the client sent
    replicas: AtLeastOne | None = None
    is_pinned: bool = True
    expires_at_s: Annotated[float, msgspec.Meta(ge=0, le=1e12)] | None = None
    tenant: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    namespace: Annotated[str, msgspec.Meta(max_length=MAX_TENANT)] = ""
    is_shared: bool = False
    is_in_host: bool | msgspec.UnsetType = msgspec.UNSET  # left out unless it is True
    version: int = VERSION


class PrefixKey(NamedTuple):
    """The parts of a prefix's name."""

    id: str
    version: int

    @classmethod
    def parse(cls, name: bytes) -> "PrefixKey":
        """Split ID@VERSION. Raises UnreadableError."""
        id_, _, version = text(name).rpartition("@")
        if not (id_ and version.isdecimal() and version.isascii() and len(version) < 10):
            raise UnreadableError("its name is not ID@VERSION")
        return cls(id_, int(version))


_terms = msgspec.json.Decoder(PrefixTerms)
_versions = msgspec.json.Decoder(Versioned)


def own_id(tenant: str, name: str) -> str:
    """Return the id of a prefix that only this tenant can use, so that tenants can reuse names."""
    return f"{tenant}{TENANT_SEPARATOR}{name}"


def shared_tokens(token_ids: NDArray[np.uint32], shared: Iterable[Prefix], block_size: int) -> int:
    """Return the tokens of the longest of these prefixes that the prompt starts with.

    Only full blocks of a prefix count.
    """
    longest, now_s = 0, time.time()
    for prefix in shared:
        full = prefix.full_tokens(block_size)
        is_longer = longest < full <= len(token_ids) and not prefix.is_expired(now_s)
        if is_longer and _begins(prefix.token_ids, token_ids, full):
            longest = full
    return longest


def _begins(ids: NDArray[np.uint32], others: NDArray[np.uint32], tokens: int) -> bool:
    # Most prefixes differ in the first or the last token. To compare all tokens of a thousand
    # prefixes would take milliseconds.
    last = tokens - 1
    is_candidate = ids[0] == others[0] and ids[last] == others[last]
    return bool(is_candidate) and np.array_equal(ids[:tokens], others[:tokens])


def assigned(prefix: Prefix, replica_ids: Iterable[str]) -> list[str]:
    """Return which of the live replicas keep the prefix warm, by rendezvous hashing.

    Every process that knows the same replicas gets the same result. If a replica joins or leaves,
    only its own prefixes move. A new version goes to the replicas of the old one.
    """
    ranked = sorted(replica_ids, key=lambda replica_id: _rank(prefix.id, replica_id), reverse=True)
    if prefix.replicas is None:
        return ranked
    return ranked[: prefix.replicas]


class Prefixes:
    """The named prefixes of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make them raise an error.
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

    @with_timeout
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
        """Declare the id's next version. A repeated declaration only updates the expiry.

        Raises:
            OtherTenantError: another tenant has declared the id.
        """

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

    @with_timeout
    async def all(self) -> list[Prefix]:
        """Return every version that is not dropped, oldest first; drop expired versions."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._declared)
        pipeline.hgetall(self._tokens)
        declared, tokens = await pipeline.execute()
        decoded = []
        for name, packed in declared.items():
            if (terms := self._terms(name, packed)) is not None:
                decoded.append((terms.order, name, terms))
        prefixes = [
            self._prefix(name, terms, tokens.get(name)) for _, name, terms in sorted(decoded)
        ]
        readable, now_s = [prefix for prefix in prefixes if prefix is not None], time.time()
        if any(prefix.is_expired(now_s) for prefix in readable):
            await self._remove(lambda _, terms: terms is not None and _is_expired(terms, now_s))
        return [prefix for prefix in readable if not prefix.is_expired(now_s)]

    @with_timeout
    async def drop(self, id: str) -> bool:  # noqa: A002
        """Remove all versions of the id and its counters; return False if there was none."""
        return await self._remove(lambda key, _: key.id == id)

    @with_timeout
    async def retire(self, id: str, version: int) -> None:  # noqa: A002
        """Remove this version; later versions stay."""
        await self._remove(lambda key, _: key == (id, version))

    @with_timeout
    async def revision(self) -> int:
        """Return a number that is new after every change.

        It is 0 if Redis never had a prefix, or has lost its data.
        """
        return _number(await self._redis.get(self._revision))

    @with_timeout
    async def restore(self, prefixes: Sequence[Prefix]) -> None:
        """Write the prefixes again if Redis has lost its data, that is, if it has no revision."""

        async def change(pipe: Any) -> None:
            if not _number(await pipe.get(self._revision)):
                await self._write(pipe, prefixes)

        await self._transaction(change)

    @with_timeout
    async def count(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """Add to the counters.

        Args:
            uses: id -> (hits, tokens saved); dropped ids are ignored.
        """

        async def change(pipe: Any) -> None:
            declared = uses.keys() & set(map(_id, await pipe.hkeys(self._declared)))
            garbage = [
                (key, id_)
                for key in (self._hits, self._saved)
                for id_ in declared
                if (number := await pipe.hget(key, id_)) is not None and not number.isdigit()
            ]
            pipe.multi()
            for key, id_ in garbage:
                pipe.hdel(key, id_)
            for id_ in declared:
                hits, tokens_saved = uses[id_]
                pipe.hincrby(self._hits, id_, hits)
                pipe.hincrby(self._saved, id_, tokens_saved)

        await self._transaction(change)

    @with_timeout
    async def uses(self) -> Mapping[str, tuple[int, int]]:
        """Return id -> (hits, tokens saved) since its first declaration, for ids with hits."""
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
        """Return the id's last version; if the counter is unreadable, the highest declared one."""
        packed = await pipe.hget(self._versions, id_)
        if packed is None or _number(packed):
            return _number(packed)
        keys = [self._key(name) for name in await pipe.hkeys(self._declared)]
        return max((key.version for key in keys if key and key.id == id_), default=0)

    def _key(self, name: bytes) -> PrefixKey | None:
        """Parse a name; None if it is unreadable."""
        try:
            return PrefixKey.parse(name)
        except UnreadableError as error:
            self.unreadable.add("prefix", name, error)
            return None

    def _terms(self, name: bytes, packed: bytes) -> PrefixTerms | None:
        """Decode a declaration; None if it is unreadable."""
        try:
            PrefixKey.parse(name)
            return _decode_terms(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add("prefix", name, error)
            return None

    def _prefix(self, name: bytes, terms: PrefixTerms, packed: bytes | None) -> Prefix | None:
        """Return a prefix; None if its tokens are missing or unreadable."""
        if not packed or len(packed) % TOKEN_BYTES:
            reason = f"the size of its tokens is {len(packed or b'')} bytes"
            self.unreadable.add("prefix", name, f"{reason}, which is 0 or no multiple of 4")
            return None
        id_, version = PrefixKey.parse(name)
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
        """Begin the transaction's writes; existing prefixes keep their order."""
        existing = [await pipe.hget(self._declared, prefix.name) for prefix in prefixes]
        revision = await self._next_revision(pipe)
        pipe.multi()
        pipe.set(self._revision, revision + len(prefixes))
        for order, (prefix, packed) in enumerate(zip(prefixes, existing, strict=True), revision):
            terms = packed and self._terms(prefix.name.encode(), packed)
            new_terms = _terms_of(prefix, order=terms.order if terms else order)
            pipe.hset(self._declared, prefix.name, encode(new_terms))
            pipe.hset(self._tokens, prefix.name, prefix.token_ids.astype("<u4").tobytes())
            pipe.hset(self._versions, prefix.id, prefix.version)

    async def _remove(self, is_removed: Callable[[PrefixKey, PrefixTerms | None], bool]) -> bool:
        """Remove the matching prefixes; return False if there are none.

        Unreadable terms are None.
        """

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
        # The first number is the current time, so that numbers are new after Redis lost its data.
        revision = _number(await pipe.get(self._revision))
        return revision + 1 if revision else time.time_ns() // 1000


def _rank(prefix_id: str, replica_id: str) -> tuple[int, str]:
    return xxh3_64_intdigest(f"{prefix_id}\0{replica_id}".encode()), replica_id


DECLARED = ("source", "replicas", "is_pinned", "is_in_host", "tenant", "namespace", "is_shared")


def is_same(first: Prefix, second: Prefix) -> bool:
    """Return whether two declarations are equal, apart from version and expiry."""
    return np.array_equal(first.token_ids, second.token_ids) and all(
        getattr(first, name) == getattr(second, name) for name in DECLARED
    )


def _terms_of(prefix: Prefix, *, order: int) -> PrefixTerms:
    return PrefixTerms(
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


def _decode_terms(packed: bytes) -> PrefixTerms:
    """Decode a declaration. Raises one of DECODE_ERRORS."""
    check_version(_versions, packed)
    terms = _terms.decode(packed)
    source = msgspec.convert(terms.source, Source)
    if (source.prompt is None) == (source.messages is None):
        raise UnreadableError("its source must be either a prompt or messages")
    return terms


def _is_expired(terms: PrefixTerms, now_s: float) -> bool:
    return terms.expires_at_s is not None and terms.expires_at_s <= now_s


def _number(packed: bytes | None) -> int:
    """Decode a number; 0 if it is missing or unreadable."""
    return int(packed) if packed and packed.isdigit() and len(packed) <= NUMBER_DIGITS else 0


def _id(name: bytes) -> str:
    return name.decode(errors="replace").rsplit("@", 1)[0]
