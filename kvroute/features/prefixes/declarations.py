"""Declares, lists and drops the named prefixes of a model."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from heapq import nlargest
from typing import Any

from kvroute.blocks.tiers import GPU, HOST, Tier, up_to
from kvroute.contract.own_names import own_id
from kvroute.contract.records import ReplicaRecord
from kvroute.features.figure import Figure
from kvroute.features.gate import ANYONE, Caller
from kvroute.features.prefixes import (
    CANNOT_PIN,
    OF_ANOTHER_TENANT,
    TENANT_HAS_TOO_MANY,
    TENANT_PINS_TOO_MUCH,
    TOO_MANY,
)
from kvroute.features.prefixes.catalogue import Catalogue, assigned_records, is_visible, is_warm
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.declaration import PrefixDeclaration
from kvroute.features.prefixes.named_prefix import Prefix, is_same
from kvroute.features.prefixes.prefix_store import OtherTenantError
from kvroute.features.prefixes.warm import warm_at
from kvroute.router.api.errors import ApiError, needing_redis
from kvroute.store.connection import REDIS_ERRORS
from kvroute.wording import plural

MAX_PREFIXES = 1_000  # the most versions of all named prefixes together
MOST = 20  # the most prefixes whose warmth `figures` checks
ABOUT = (  # explains the figure
    "Prompt tokens that came from a cache since replicas keep declared prefixes warm, of all "
    "routers. GET /v1/prefixes has each prefix."
)

Records = list[ReplicaRecord]
Uses = Mapping[str, tuple[int, int]]  # id -> number of prompts with a hit, tokens that they saved


class Declarations:
    """Declares, lists and drops prefixes.

    declare() and drop() raise ApiError if Redis cannot be used.

    Args:
        catalogue: the router's copy of the prefixes.
        composer: renders a declaration to token ids.
        read_records: reads the replicas' current records.
        block_size: tokens of a block.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        composer: PrefixComposer,
        read_records: Callable[[], Awaitable[Records]],
        *,
        block_size: int,
    ) -> None:
        self._catalogue = catalogue
        self._composer = composer
        self._read_records = read_records
        self._block_size = block_size
        self._declaring = asyncio.Lock()

    async def declare(
        self,
        declaration: PrefixDeclaration,
        caller: Caller = ANYONE,
        *,
        max_model_len: int,
    ) -> tuple[dict[str, Any], bool]:
        """Declare a prefix; return it, and whether this call created a new version.

        Args:
            max_model_len: the most tokens of a prompt and its response together.

        Raises:
            ApiError: the declaration is not valid, or would exceed a limit.
        """
        tenant = caller.tenant
        is_own = bool(tenant) and not declaration.shared
        source = declaration.source()
        token_ids = await self._composer.prefix_tokens(source, max_model_len=max_model_len)
        wanted = Prefix(
            own_id(tenant, declaration.id) if is_own else declaration.id,
            0,
            token_ids,
            source,
            None if declaration.replicas == "all" else declaration.replicas,
            declaration.pinned is not False,
            declaration.ttl_s and self._catalogue.store.clock.now_s() + declaration.ttl_s,
            tenant=tenant,
            namespace=caller.salt if is_own else "",
            is_shared=declaration.shared,
            is_in_host=declaration.pinned == HOST.name,
        )
        with needing_redis():
            return await self._declare(wanted, caller.limits)

    async def list(self, caller: Caller = ANYONE) -> list[dict[str, Any]]:
        """Return the newest version of each prefix that the caller may use, the oldest first."""
        records, uses = await self._status()
        prefixes = self._catalogue.all()
        latest = {prefix.id: prefix for prefix in prefixes if is_visible(prefix, caller)}
        return [self._as_json(prefix, records, uses) for prefix in latest.values()]

    async def figures(self) -> Sequence[Figure]:
        """Return what all prefixes have saved, and which of the most useful ones are not warm.

        Every client with the role `observe` may read the result. So it has no names of prefixes
        that only one tenant can use.
        """
        records, uses = await self._status()
        latest = {prefix.id: prefix for prefix in self._catalogue.all()}
        visible = [prefix for prefix in latest.values() if not prefix.namespace]
        cold = []
        for prefix in nlargest(MOST, visible, key=lambda prefix: uses.get(prefix.id, (0, 0))[1]):
            assigned = assigned_records(prefix, records)
            if len(self._warm(prefix, assigned)) < len(assigned):
                cold.append(prefix.label)
            await asyncio.sleep(0)  # let other tasks run: a look at a prefix takes milliseconds
        if not latest:
            return []
        prompts, tokens = (sum(counts) for counts in zip((0, 0), *uses.values(), strict=True))
        note = f"in {plural(prompts, 'prompt')}; {len(latest):,} declared, "
        note += f"not warm on all replicas: {', '.join(cold[:3])}" if cold else "all of them warm"
        return [Figure("Saved by named prefixes", plural(tokens, "token"), note, ABOUT)]

    async def get(self, name: str, caller: Caller = ANYONE) -> dict[str, Any]:
        """Return the newest version of the prefix with this name.

        Raises:
            ApiError: no prefix of this name is declared.
        """
        records, uses = await self._status()
        return self._as_json(self._latest(name, caller), records, uses)

    async def drop(self, name: str, caller: Caller = ANYONE) -> dict[str, Any]:
        """Drop all versions of the prefix with this name, and return a confirmation.

        Raises:
            ApiError: no prefix of this name is declared, or it belongs to another tenant.
        """
        with needing_redis():
            await self._catalogue.refresh()
            prefix = self._latest(name, caller)
            if caller.tenant and prefix.tenant not in ("", caller.tenant):
                raise _other_tenant(name)
            if not await self._catalogue.store.drop(prefix.id):
                raise self._catalogue.unknown("id", name, caller)
            await self._catalogue.refresh()
        return {"id": name, "object": "prefix", "deleted": True}

    def _latest(self, name: str, caller: Caller) -> Prefix:
        """Return the newest version of the prefix that the caller can use by this name.

        Raises:
            ApiError: no prefix of this name is declared.
        """
        in_use = self._catalogue.find(name, caller)
        prefix = in_use and self._catalogue.latest(in_use.id)
        if prefix is None:
            raise self._catalogue.unknown("id", name, caller)
        return prefix

    async def _declare(
        self, wanted: Prefix, limits: Mapping[str, int]
    ) -> tuple[dict[str, Any], bool]:
        """Declare a prefix. Only one call runs at a time, so it sees all earlier declarations."""
        async with self._declaring:
            prefix, is_new = await self._declare_next(wanted, limits)
        return self._as_json(prefix, *await self._status()), is_new

    async def _declare_next(self, wanted: Prefix, limits: Mapping[str, int]) -> tuple[Prefix, bool]:
        await self._catalogue.refresh()
        before = self._catalogue.latest(wanted.id)
        if before is None or not is_same(before, wanted):
            self._check_number(wanted.label)
            check_limits(wanted, self._catalogue.all(), limits, block_size=self._block_size)
            self._check_budget(wanted, await self._read_records())
        try:
            prefix = await self._catalogue.store.declare(wanted)
        except OtherTenantError:
            raise _other_tenant(wanted.label) from None
        return prefix, before is None or before.version != prefix.version

    def _check_number(self, id_: str) -> None:
        if len(self._catalogue.all()) >= MAX_PREFIXES:
            raise ApiError(
                409,
                f"prefix {id_!r} would exceed the limit of {MAX_PREFIXES} prefixes; drop one with "
                "DELETE /v1/prefixes/ID",
                param="id",
                code=TOO_MANY,
            )

    def _check_budget(self, wanted: Prefix, records: Records) -> None:
        """Check that each replica of the prefix may pin so many more blocks.

        Blocks of older versions count too, since they stay pinned until the new version is warm.

        Raises:
            ApiError: a replica may not pin so many blocks.
        """
        if not wanted.is_pinned:
            return
        needed = wanted.full_blocks(self._block_size)
        taken = self._pinned_blocks(records, wanted.tier)
        for record in assigned_records(wanted, records):
            budget = record.facts.pin_blocks_in(wanted.tier)
            free = max(0, budget - taken[record.id])
            if record.facts.server and (needed or wanted.tier != GPU):
                raise ApiError(
                    409,
                    f"prefix {wanted.label!r} cannot be pinned: {record.facts.server} is an "
                    'attached server; send "pinned": false for a prefix that may be evicted',
                    param="pinned",
                    code=CANNOT_PIN,
                )
            if wanted.tier != GPU and wanted.tier not in record.facts.tiers:
                raise _without_tier(wanted, record)
            if needed > free:
                raise ApiError(
                    409,
                    f"prefix {wanted.label!r} needs {needed} KV blocks, but replica {record.id} "
                    f"has {free} of its {budget} left (blocks for pinned prefixes in "
                    f"{wanted.tier.label}); drop a prefix, raise {wanted.tier.pin_options}, or "
                    'send "pinned": false for a prefix that may be evicted',
                    param="pinned",
                    code=CANNOT_PIN,
                )

    def _warm(self, prefix: Prefix, assigned: Records) -> Records:
        """Return the records of the assigned replicas on which the prefix is warm.

        If it is not pinned in GPU memory, a replica's report is not enough, and the index decides:
        the prefix may have been evicted, or its copy in host memory may not be complete yet.
        """
        warm = [record for record in assigned if is_warm(prefix, record)]
        if not prefix.full_blocks(self._block_size) or all(_in_gpu(prefix, r) for r in warm):
            return warm
        holders = self._catalogue.holders(
            prefix.token_ids, prefix.namespace, tiers=up_to(prefix.tier)
        )
        return [record for record in warm if _in_gpu(prefix, record) or record.id in holders]

    def _computed_tokens(self, prefix: Prefix, assigned: Records, warm: Records) -> int:
        """Return how many tokens of the prefix its replicas have cached, all added up."""
        full_tokens = prefix.full_tokens(self._block_size)
        missing = {record.id for record in assigned} - {record.id for record in warm}
        held = self._catalogue.held_tokens(prefix, tiers=up_to(prefix.tier)) if missing else {}
        partial_tokens = sum(min(full_tokens, held.get(id_, 0)) for id_ in missing)
        return full_tokens * len(warm) + partial_tokens

    def _pinned_blocks(self, records: Records, tier: Tier) -> Counter[str]:
        """Return how many blocks each replica has to pin in a tier, by replica id.

        A block that belongs to two prefixes counts twice.
        """
        taken = Counter[str]()
        for prefix in self._catalogue.all():
            if prefix.is_pinned and prefix.tier == tier:
                for record in assigned_records(prefix, records):
                    taken[record.id] += prefix.full_blocks(self._block_size)
        return taken

    async def _status(self) -> tuple[Records, Uses]:
        """Return the live replicas and the counts of uses from Redis.

        If Redis cannot be used, return the replicas of the last poll and no counts.
        """
        try:
            await self._catalogue.refresh()
            await self._catalogue.flush()
            return await self._read_records(), await self._catalogue.store.uses()
        except REDIS_ERRORS:
            return self._catalogue.records, {}

    def _as_json(self, prefix: Prefix, records: Records, uses: Uses) -> dict[str, Any]:
        assigned = assigned_records(prefix, records)
        warm = self._warm(prefix, assigned)
        in_use = self._catalogue.get(prefix.id) or prefix
        hits, tokens_saved = uses.get(prefix.id, (0, 0))
        return {
            "id": prefix.label,
            "object": "prefix",
            "version": prefix.version,
            "version_in_use": in_use.version,
            "tokens": len(prefix.token_ids),
            "full_blocks": prefix.full_blocks(self._block_size),
            "partial_tokens": len(prefix.token_ids) % self._block_size,
            "shared": prefix.is_shared,
            "replicas": prefix.replicas or "all",
            "assigned_to": [record.id for record in assigned],
            "warm_on": [record.id for record in warm],
            "computed_tokens": self._computed_tokens(prefix, assigned, warm),
            "pinned": _pinned(prefix, warm) if warm else _declared_pin(prefix),
            "hits": hits,
            "tokens_saved": tokens_saved,
            "expires_at": prefix.expires_at_s,
            **self._warning(prefix),
        }

    def _warning(self, prefix: Prefix) -> dict[str, str]:
        """Return the member `warning` if nothing of the prefix can be cached, else no member."""
        if prefix.full_blocks(self._block_size):
            return {}
        message = (
            "nothing of this prefix can be cached: it has "
            f"{plural(len(prefix.token_ids), 'token')}, and a block has {self._block_size}. "
            "Declare a longer one"
        )
        return {"warning": message}


def _other_tenant(name: str) -> ApiError:
    """Return the error for a change of a prefix that another tenant has declared."""
    return ApiError(
        403,
        f"prefix {name!r} is shared by another tenant, and only that tenant can change it; use "
        "another name",
        param="id",
        code=OF_ANOTHER_TENANT,
    )


def _without_tier(wanted: Prefix, record: ReplicaRecord) -> ApiError:
    """Return the error for a pin in a tier that the replica does not have."""
    return ApiError(
        409,
        f"prefix {wanted.label!r} cannot be pinned in {wanted.tier.label}: replica {record.id} "
        "keeps no cache there. Start the cluster with --host-cache-gb, or pin the prefix in GPU "
        'memory: with "pinned": true, or with kvroute prefixes add without --host',
        param="pinned",
        code=CANNOT_PIN,
    )


def _declared_pin(prefix: Prefix) -> bool | str:
    """Return `pinned` as it was declared."""
    return prefix.is_pinned and (True if prefix.tier == GPU else prefix.tier.name)


def _pinned(prefix: Prefix, warm: Records) -> bool | str:
    """Return whether the prefix is pinned on all of these replicas.

    If it is pinned in a slower tier than GPU memory on one of them, return the tier's name.
    """
    pins = [warm_at(record).get(prefix.name) for record in warm]
    if not all(pin and pin.is_pinned for pin in pins):
        return False
    slowest = max(pin.tier for pin in pins if pin)
    return True if slowest == GPU else slowest.name


def _in_gpu(prefix: Prefix, record: ReplicaRecord) -> bool:
    """Return whether the replica has pinned the prefix in GPU memory."""
    pin = warm_at(record).get(prefix.name)
    return pin is not None and pin.is_pinned and pin.tier == GPU


def check_limits(
    wanted: Prefix, declared: Iterable[Prefix], limits: Mapping[str, int], *, block_size: int
) -> None:
    """Check that a tenant may declare a prefix.

    Older versions of the prefix do not count, since the new version replaces them.

    Args:
        wanted: the prefix to declare.
        declared: all prefixes that are declared already.
        limits: the limits of the caller.

    Raises:
        ApiError: the tenant has too many prefixes or pinned blocks.
    """
    own = {prefix.id: prefix for prefix in declared if prefix.tenant == wanted.tenant}
    own[wanted.id] = wanted
    _check_number(wanted, len(own), limits.get("max_prefixes"))
    blocks = sum(prefix.full_blocks(block_size) for prefix in own.values() if prefix.is_pinned)
    _check_blocks(wanted, blocks, limits.get("max_pinned_blocks"))


def _check_number(wanted: Prefix, number: int, limit: int | None) -> None:
    if limit is None or number <= limit:
        return
    raise ApiError(
        409,
        f"tenant {wanted.tenant} may declare {limit} prefixes, and {wanted.label!r} would be "
        f"number {number}; drop one with DELETE /v1/prefixes/ID",
        param="id",
        code=TENANT_HAS_TOO_MANY,
    )


def _check_blocks(wanted: Prefix, blocks: int, limit: int | None) -> None:
    if limit is None or not wanted.is_pinned or blocks <= limit:
        return
    raise ApiError(
        409,
        f"with prefix {wanted.label!r}, tenant {wanted.tenant} would pin {blocks} KV blocks, but "
        f'may pin only {limit}; drop a prefix, or send "pinned": false for one that may be evicted',
        param="pinned",
        code=TENANT_PINS_TOO_MUCH,
    )
