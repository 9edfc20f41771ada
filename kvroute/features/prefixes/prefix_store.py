"""Named prefixes in Redis: beginnings of prompts that clients declare under an id.

Some replicas keep a prefix warm, that is, in their caches: named_prefix.py computes which ones. The
keys have the same hash tag as the index (index.py), but no lease:

    kvroute:{TAG}:prefixes           hash    ID@VERSION -> JSON of PrefixTerms
    kvroute:{TAG}:prefixes:tokens    hash    ID@VERSION -> token ids, little-endian u32
    kvroute:{TAG}:prefixes:versions  hash    id -> its last version; kept after a drop
    kvroute:{TAG}:prefixes:hits      hash    id -> number of requests with a cache hit on it
    kvroute:{TAG}:prefixes:saved     hash    id -> tokens that these requests reused
    kvroute:{TAG}:prefixes:revision  string  a number that changes with every change of a prefix

Every change is one transaction, which starts again if another process changes the revision
meanwhile. Unreadable entries are skipped and counted.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvroute.contract.records import encode
from kvroute.contract.unreadable import DECODE_ERRORS, UnreadableError
from kvroute.features.prefixes import KIND
from kvroute.features.prefixes.named_prefix import (
    Prefix,
    PrefixKey,
    PrefixTerms,
    decode_terms,
    is_same,
    terms_of,
)
from kvroute.store.connection import with_timeout
from kvroute.store.revision import RevisedStore, Transaction, number

TOKEN_BYTES = 4  # bytes of one token id


class OtherTenantError(Exception):
    """The id belongs to another tenant, which declared it first."""


class Prefixes(RevisedStore[Prefix]):
    """The named prefixes of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable. Unreadable data in Redis does
    not make them raise an error.
    """

    NAME = "prefixes"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tokens = f"{self._values}:tokens"
        self._versions = f"{self._values}:versions"
        self._hits = f"{self._values}:hits"
        self._saved = f"{self._values}:saved"

    @with_timeout
    async def declare(self, wanted: Prefix) -> Prefix:
        """Declare the next version of a prefix, and return it. The version of `wanted` is ignored.

        A declaration that is equal to the latest version only updates that version's expiry.

        Raises:
            OtherTenantError: another tenant declared the id's latest version.
        """

        async def change(pipe: Transaction) -> Prefix:
            last = await self._last_version(pipe, wanted.id)
            latest = await self._read(pipe, f"{wanted.id}@{last}")
            if latest is not None and wanted.tenant and latest.tenant not in ("", wanted.tenant):
                raise OtherTenantError(wanted.id)
            new = replace(wanted, version=last + 1)
            if latest is not None and is_same(latest, new):
                new = replace(latest, expires_at_s=wanted.expires_at_s)
            await self._write(pipe, [new])
            return new

        return await self._transaction(change)

    @with_timeout
    async def all(self) -> list[Prefix]:
        """Return all prefixes, oldest first; drop the versions that have expired."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._values)
        pipeline.hgetall(self._tokens)
        declared, tokens = await pipeline.execute()
        decoded = []
        for name, packed in declared.items():
            if (terms := self._terms(name, packed)) is not None:
                decoded.append((terms.order, name, terms))
        prefixes = [
            self._build(name, terms, tokens.get(name)) for _, name, terms in sorted(decoded)
        ]
        readable, now_s = [prefix for prefix in prefixes if prefix is not None], self.clock.now_s()
        if any(prefix.is_expired(now_s) for prefix in readable):
            await self._remove(lambda _, terms: terms is not None and _is_expired(terms, now_s))
        return [prefix for prefix in readable if not prefix.is_expired(now_s)]

    @with_timeout
    async def drop(self, id: str) -> bool:  # noqa: A002
        """Remove all versions of the id and its counters; return False if there was no version."""
        return await self._remove(lambda key, _: key.id == id)

    @with_timeout
    async def retire(self, id: str, version: int) -> None:  # noqa: A002
        """Remove this version; keep all later versions."""
        await self._remove(lambda key, _: key == (id, version))

    @with_timeout
    async def count(self, uses: Mapping[str, tuple[int, int]]) -> None:
        """Add to the counters of hits and saved tokens.

        Args:
            uses: id -> (hits, saved tokens); ids that were dropped are ignored.
        """

        async def change(pipe: Transaction) -> None:
            declared = uses.keys() & set(map(_id, await pipe.hkeys(self._values)))
            garbage = [
                (key, id_)
                for key in (self._hits, self._saved)
                for id_ in declared
                if (packed := await pipe.hget(key, id_)) is not None and not packed.isdigit()
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
        """Return id -> (hits, saved tokens) since the id was declared, for all ids with hits."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.hgetall(self._hits)
        pipeline.hgetall(self._saved)
        hits, saved = await pipeline.execute()
        return {
            id_.decode(errors="replace"): (number(n), number(saved.get(id_)))
            for id_, n in hits.items()
        }

    async def _read(self, pipe: Transaction, name: str) -> Prefix | None:
        packed, key = await pipe.hget(self._values, name), name.encode()
        terms = None if packed is None else self._terms(key, packed)
        if terms is None:
            return None
        return self._build(key, terms, await pipe.hget(self._tokens, name))

    async def _last_version(self, pipe: Transaction, id_: str) -> int:
        """Return the number of the id's last version.

        If that number in Redis is unreadable, return the highest version in the declarations.
        """
        packed = await pipe.hget(self._versions, id_)
        if packed is None or number(packed):
            return number(packed)
        keys = [self._key(name) for name in await pipe.hkeys(self._values)]
        return max((key.version for key in keys if key and key.id == id_), default=0)

    def _key(self, name: bytes) -> PrefixKey | None:
        """Parse a name; return None if it is unreadable."""
        try:
            return PrefixKey.parse(name)
        except UnreadableError as error:
            self.unreadable.add(KIND, name, error)
            return None

    def _terms(self, name: bytes, packed: bytes) -> PrefixTerms | None:
        """Decode a declaration; return None if it is unreadable."""
        try:
            PrefixKey.parse(name)
            return decode_terms(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add(KIND, name, error)
            return None

    def _build(self, name: bytes, terms: PrefixTerms, packed: bytes | None) -> Prefix | None:
        """Build a prefix; return None if its token ids are missing or unreadable."""
        if not packed or len(packed) % TOKEN_BYTES:
            reason = f"its token ids have {len(packed or b'')} bytes; expected a multiple of 4"
            self.unreadable.add(KIND, name, reason)
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

    async def _write(self, pipe: Transaction, prefixes: Sequence[Prefix]) -> None:
        """Queue the writes in the transaction. A version that exists keeps its `order`."""
        existing = [await pipe.hget(self._values, prefix.name) for prefix in prefixes]
        revision = await self._begin_writes(pipe, len(prefixes) + 1)
        for order, (prefix, packed) in enumerate(zip(prefixes, existing, strict=True), revision):
            terms = packed and self._terms(prefix.name.encode(), packed)
            new_terms = terms_of(prefix, order=terms.order if terms else order)
            pipe.hset(self._values, prefix.name, encode(new_terms))
            pipe.hset(self._tokens, prefix.name, prefix.token_ids.astype("<u4").tobytes())
            pipe.hset(self._versions, prefix.id, prefix.version)

    async def _remove(self, is_removed: Callable[[PrefixKey, PrefixTerms | None], bool]) -> bool:
        """Remove all prefixes for which `is_removed` is true; return False if there are none.

        `is_removed` gets None for unreadable terms.
        """

        async def change(pipe: Transaction) -> bool:
            declared = await pipe.hgetall(self._values)
            removed = [
                name
                for name, packed in declared.items()
                if (key := self._key(name)) and is_removed(key, self._terms(name, packed))
            ]
            if not removed:
                return False
            left = declared.keys() - removed
            unused = {_id(name) for name in removed} - {_id(name) for name in left}
            await self._begin_writes(pipe)
            pipe.hdel(self._values, *removed)
            pipe.hdel(self._tokens, *removed)
            if unused:
                pipe.hdel(self._hits, *unused)
                pipe.hdel(self._saved, *unused)
            return True

        return await self._transaction(change)


def _id(name: bytes) -> str:
    return name.decode(errors="replace").rsplit("@", 1)[0]


def _is_expired(terms: PrefixTerms, now_s: float) -> bool:
    return terms.expires_at_s is not None and terms.expires_at_s <= now_s
