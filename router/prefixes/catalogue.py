"""A copy of all named prefixes in the router's memory, which follows the declarations in Redis."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

import numpy as np
from redis.exceptions import RedisError

from kvroute.blocks.chain import Scope
from kvroute.blocks.tiers import Tier
from kvroute.contract.generation import TokenIds
from kvroute.contract.prefix_id import TENANT_SEPARATOR
from kvroute.contract.records import ReplicaRecord
from kvroute.keys.keyring import Caller
from kvroute.router.api.errors import ApiError, redis_away
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.composer import PrefixComposer
from kvroute.settings.multi_task import Task
from kvroute.store.named_prefix import Prefix, assigned, own_id, shared_tokens
from kvroute.store.outage import Outage
from kvroute.store.prefixes import Prefixes

log = logging.getLogger("kvroute.prefixes")

POLL_S = 0.25  # seconds between two checks of Redis for new declarations
COUNT_S = 1.0  # seconds between two writes of the counts of uses to Redis
RETIRE_S = 5.0  # seconds that a newer version is in use before older versions are released
RETRY_S = 0.5  # seconds between attempts while Redis is away
# Names that an unknown name is compared with to suggest similar ones; each takes up to 1 ms.
COMPARED = 50


def is_warm(prefix: Prefix, record: ReplicaRecord) -> bool:
    """Return whether all full blocks of the prefix are in that replica's cache."""
    full_blocks = prefix.full_blocks(record.facts.block_size)
    warm = record.pins.get(prefix.name)
    return not full_blocks or (warm is not None and warm.blocks >= full_blocks)


def keepers(prefix: Prefix, records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Return the live replicas that keep the prefix warm, or will soon."""
    by_id = {record.id: record for record in records}
    return [by_id[replica_id] for replica_id in assigned(prefix, by_id)]


def is_visible(prefix: Prefix, caller: Caller | None) -> bool:
    """Return whether the caller may use and see the prefix."""
    return caller is None or not prefix.namespace or prefix.tenant == caller.tenant


class Catalogue:
    """Follows the declarations in Redis, and restores them if Redis lost them."""

    def __init__(self, store: Prefixes, fleet: Fleet, *, block_size: int) -> None:
        self.store = store
        self._fleet = fleet
        self.block_size = block_size
        self._versions: dict[str, list[Prefix]] = {}  # id -> versions, oldest first
        self._shared: list[Prefix] = []  # every version of the prefixes that all namespaces share
        self._revision: int | None = None  # revision of the last read; None: nothing was read yet
        self._reading = asyncio.Lock()
        self._outage = Outage(log, "named prefixes stay as they are")
        self._settled_s: dict[str, float] = {}  # name in use with older versions -> since when
        self._uses: dict[str, tuple[int, int]] = {}  # id -> hits, tokens saved; not yet written
        self._saved = Counter[str]()  # id -> tokens saved since this router knows it

    async def run(self, tasks: Sequence[Task], composer: PrefixComposer) -> None:
        """Declare the tasks, then follow Redis until cancelled."""
        while True:
            try:
                await self.refresh()
                self._outage.end()
                await self._declare(tasks, composer)
                tasks = ()
                await self._follow()
            except (RedisError, OSError) as error:
                self._outage.begin(error)
                await asyncio.sleep(RETRY_S)

    async def named(self, param: str, name: str, caller: Caller | None = None) -> Prefix:
        """Return the version to use of the caller's own prefix, else of the shared prefix.

        Redis is read only if the name is unknown here.

        Raises:
            ApiError: the name is unknown in Redis, too.
        """
        prefix = self.find(name, caller)
        if prefix is None:
            await self._refresh_unknown(param)
            prefix = self.find(name, caller)
        if prefix is None:
            raise self.unknown(param, name, caller)
        return prefix

    def find(self, name: str, caller: Caller | None = None) -> Prefix | None:
        """Return the version to use, as `named` does, but without Redis.

        None: the name is unknown here.
        """
        own = self.get(own_id(caller.tenant, name)) if caller else None
        found = own or self.get(name)
        return found if found and is_visible(found, caller) else None

    @property
    def records(self) -> list[ReplicaRecord]:
        """Return the records of the live replicas, as of the last poll."""
        return self._fleet.replicas.records

    def holders(
        self, token_ids: TokenIds, namespace: str, *, tiers: Sequence[Tier] = ()
    ) -> set[str]:
        """Return the replicas that have all these tokens cached, according to the index."""
        scope = self._scope(token_ids, namespace)
        return self._fleet.caches.holders(token_ids, scope, tiers=tiers)

    def held_tokens(self, prefix: Prefix, *, tiers: Sequence[Tier] = ()) -> dict[str, int]:
        """Return how many of the prefix's tokens each replica holds, according to the index."""
        scope = self._scope(prefix.token_ids, prefix.namespace)
        return self._fleet.caches.held_tokens(prefix.token_ids, scope, tiers=tiers)

    def _scope(self, token_ids: TokenIds, namespace: str) -> Scope:
        return Scope("", namespace, self.shared_tokens(token_ids) if namespace else 0)

    def get(self, id_: str) -> Prefix | None:
        """Return the newest version that is warm on all its replicas, else the newest."""
        versions = self._living(id_)
        if len(versions) > 1:
            return next(filter(self.is_settled, reversed(versions)), versions[-1])
        return versions[0] if versions else None

    def latest(self, id_: str) -> Prefix | None:
        """Return the last declared version of this name."""
        return next(reversed(self._living(id_)), None)

    def all(self) -> list[Prefix]:
        """Return every version of every prefix that has not expired."""
        return [prefix for id_ in self._versions for prefix in self._living(id_)]

    def declared_as(self, token_ids: TokenIds, namespace: str = "") -> Prefix | None:
        """Return the namespace's prefix that has exactly these full blocks."""
        for prefix in self.all():
            if prefix.namespace != namespace:
                continue
            full = prefix.full_tokens(self.block_size)
            if full == len(token_ids) and np.array_equal(prefix.token_ids[:full], token_ids):
                return prefix
        return None

    def shared_tokens(self, token_ids: TokenIds) -> int:
        """Return how many tokens of this prompt, in whole blocks, belong to a shared prefix."""
        return shared_tokens(token_ids, self._shared, self.block_size) if self._shared else 0

    def is_settled(self, prefix: Prefix) -> bool:
        """Return whether all replicas that keep the prefix had it warm at the last poll."""
        records = keepers(prefix, self.records)
        return bool(records) and all(is_warm(prefix, record) for record in records)

    def count(self, prefix: Prefix, cached_tokens: int) -> None:
        """Count a prompt with this prefix, of which `cached_tokens` were cached."""
        saved = min(cached_tokens, prefix.full_tokens(self.block_size))
        if saved:
            hits, tokens_saved = self._uses.get(prefix.id, (0, 0))
            self._uses[prefix.id] = (hits + 1, tokens_saved + saved)
            self._saved[prefix.id] += saved

    def saved_tokens(self) -> dict[str, int]:
        """Return the tokens that each prefix has saved, as this router counted: id -> tokens.

        Prefixes of tenants are left out, since nobody else may see their names. Other threads may
        call this.
        """
        return {id_: self._saved[id_] for id_ in self._versions if TENANT_SEPARATOR not in id_}

    def unknown(self, param: str, name: str, caller: Caller | None = None) -> ApiError:
        """Return the error 404 for an unknown name, with similar names of the caller's prefixes."""
        labels = {each.label for each in self.all() if is_visible(each, caller)}
        near = get_close_matches(name, sorted(labels)[:COMPARED])
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see GET /v1/prefixes."
        return ApiError(
            404,
            f"{param} is {name!r}, and no prefix of that name is declared; {hint}",
            param=param,
            code="prefix_not_found",
        )

    def learn(self, declared: Iterable[Prefix]) -> None:
        """Replace all known versions by these, oldest first."""
        versions: dict[str, list[Prefix]] = {}
        declared = list(declared)
        for prefix in declared:
            versions.setdefault(prefix.id, []).append(prefix)
        self._versions = versions
        self._shared = [each for each in declared if each.is_shared]
        self._saved = Counter({id_: self._saved[id_] for id_ in versions})

    async def refresh(self) -> None:
        """Read the declarations if they changed.

        Raises:
            RedisError, OSError: Redis is away.
        """
        async with self._reading:
            revision = await self.store.revision()
            if not revision and self._versions:
                await self.store.restore(self.all())
                revision = await self.store.revision()
            if revision != self._revision:
                self.learn(await self.store.all())
                self._revision = revision

    async def flush(self) -> None:
        """Write the counts.

        Raises:
            RedisError, OSError: Redis is away; the counts are kept.
        """
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await self.store.count(uses)
        except (RedisError, OSError):
            for id_, (hits, saved) in uses.items():
                more = self._uses.get(id_, (0, 0))
                self._uses[id_] = (hits + more[0], saved + more[1])
            raise

    async def _follow(self) -> None:
        count_due_s = 0.0
        while True:
            await self.refresh()
            await self._retire()
            if time.monotonic() >= count_due_s:
                await self.flush()
                count_due_s = time.monotonic() + COUNT_S
            await asyncio.sleep(POLL_S)

    async def _declare(self, tasks: Sequence[Task], composer: PrefixComposer) -> None:
        """Declare the tasks as prefixes, except names that a client has declared since."""
        for task in tasks:
            latest = self.latest(task.task_id)
            if latest is not None and "task_id" not in latest.source:
                continue
            source = task.model_dump()
            try:
                token_ids = await composer.prefix_tokens(source)
            except ApiError as error:
                log.error("task %r was not declared as a prefix: %s", task.task_id, error)
                continue
            await self.store.declare(
                task.task_id, token_ids=token_ids, source=source, is_shared=True
            )
        await self.refresh()

    async def _retire(self) -> None:
        """Release older versions once a newer one has been warm everywhere for RETIRE_S."""
        now_s = time.monotonic()
        newer = [version for versions in self._versions.values() for version in versions[1:]]
        self._settled_s = {
            each.name: self._settled_s.get(each.name, now_s)
            for each in newer
            if self.is_settled(each)
        }
        for versions in list(self._versions.values()):
            since_s = [self._settled_s.get(version.name, now_s) for version in versions]
            long = [n for n, at_s in enumerate(since_s) if n and now_s - at_s >= RETIRE_S]
            for old in versions[: long[-1] if long else 0]:
                await self.store.retire(old.id, old.version)

    async def _refresh_unknown(self, param: str) -> None:
        try:
            await self.refresh()
        except (RedisError, OSError) as error:
            if self._revision is None:
                raise redis_away(error, param) from None

    def _living(self, id_: str) -> list[Prefix]:
        now_s = time.time()
        return [each for each in self._versions.get(id_, ()) if not each.is_expired(now_s)]
