"""The router's copy of all named prefixes, which it keeps equal to the declarations in Redis.

A named prefix is the beginning of prompts, which a client has declared under an id. It is assigned
to some replicas or to all. They keep it warm, that is, in their caches. A changed declaration of an
id is a new version.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from kvroute.blocks.chain import Scope
from kvroute.blocks.tiers import Tier
from kvroute.contract.generation import TokenIds
from kvroute.contract.own_names import TENANT_SEPARATOR, own_id
from kvroute.contract.records import ReplicaRecord
from kvroute.features.gate import ANYONE, Caller
from kvroute.features.prefixes import NOT_FOUND
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.named_prefix import Prefix, assigned, shared_tokens
from kvroute.features.prefixes.prefix_options import Task
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import warm_at
from kvroute.router.api.errors import ApiError, redis_away
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import REDIS_ERRORS, Outage
from kvroute.store.revision import Follower

log = logging.getLogger("kvroute.prefixes")

COUNT_S = 1.0  # seconds between two writes of the counts of uses to Redis
# Seconds for which a version must be warm on all its replicas before older versions are removed.
RETIRE_S = 5.0
# The most names that an unknown name is compared with, to suggest similar names. One comparison
# takes up to 1 ms.
COMPARED = 50


def is_warm(prefix: Prefix, record: ReplicaRecord) -> bool:
    """Return whether the replica reports all full blocks of the prefix as cached."""
    full_blocks = prefix.full_blocks(record.facts.block_size)
    pin = warm_at(record).get(prefix.name)
    return not full_blocks or (pin is not None and pin.blocks >= full_blocks)


def assigned_records(prefix: Prefix, records: Iterable[ReplicaRecord]) -> list[ReplicaRecord]:
    """Return the records of the live replicas that have to keep the prefix warm."""
    by_id = {record.id: record for record in records}
    return [by_id[replica_id] for replica_id in assigned(prefix, by_id)]


def is_visible(prefix: Prefix, caller: Caller) -> bool:
    """Return whether the caller may use and see the prefix."""
    return not caller.tenant or not prefix.namespace or prefix.tenant == caller.tenant


class Catalogue:
    """Follows the declarations in Redis, and restores them if Redis has lost them."""

    def __init__(self, store: Prefixes, fleet: Fleet, *, block_size: int) -> None:
        self.store = store
        self._fleet = fleet
        self.block_size = block_size
        self._versions: dict[str, list[Prefix]] = {}  # id -> versions, oldest first
        self._shared: list[Prefix] = []  # all versions of the prefixes that all namespaces share
        self._copy = Follower(store, restores=True, on_change=self.learn)
        # Prefix.name of a version that replaces older versions -> time since which all its replicas
        # keep it warm.
        self._settled_s: dict[str, float] = {}
        # Id -> number of prompts with a hit, and tokens that they saved, to be written to Redis.
        self._uses: dict[str, tuple[int, int]] = {}
        self._flush_due_s = 0.0  # time of the next write of these counts
        self._saved = Counter[str]()  # id -> all tokens that it saved in this router's requests

    async def run(self, tasks: Sequence[Task], composer: PrefixComposer) -> None:
        """Declare the tasks of --multi-task-prompt, then follow Redis until cancelled."""

        async def work() -> None:
            nonlocal tasks
            if tasks:
                await self._declare(tasks, composer)
                tasks = ()
            await self._retire()
            if time.monotonic() >= self._flush_due_s:
                await self.flush()
                self._flush_due_s = time.monotonic() + COUNT_S

        await self._copy.run(work, Outage(log, "named prefixes stay as they are"))

    async def named(self, param: str, name: str, caller: Caller = ANYONE) -> Prefix:
        """Return the prefix with this name, in the version that requests should use (see `get`).

        If the caller and all tenants have a prefix with this name, the caller's prefix is used.
        Redis is read only if this router does not know the name.

        Args:
            param: the field of the request that has the name, for the error message.

        Raises:
            ApiError: no prefix of this name is declared.
        """
        prefix = self.find(name, caller)
        if prefix is None:
            await self._refresh_unknown(param)
            prefix = self.find(name, caller)
        if prefix is None:
            raise self.unknown(param, name, caller)
        return prefix

    def find(self, name: str, caller: Caller = ANYONE) -> Prefix | None:
        """Return the same as `named`, but None if this router does not know the name."""
        own = self.get(own_id(caller.tenant, name)) if caller.tenant else None
        prefix = own or self.get(name)
        return prefix if prefix and is_visible(prefix, caller) else None

    @property
    def records(self) -> list[ReplicaRecord]:
        """Return the records of the live replicas, as of the last poll."""
        return self._fleet.replicas.records

    def holders(
        self, token_ids: TokenIds, namespace: str, *, tiers: Sequence[Tier] = ()
    ) -> set[str]:
        """Return the replicas with all full blocks of these tokens, according to the index."""
        scope = self._scope(token_ids, namespace)
        return self._fleet.caches.holders(token_ids, scope, tiers=tiers)

    def held_tokens(self, prefix: Prefix, *, tiers: Sequence[Tier] = ()) -> dict[str, int]:
        """Return how many of the prefix's tokens each replica holds, according to the index."""
        scope = self._scope(prefix.token_ids, prefix.namespace)
        return self._fleet.caches.held_tokens(prefix.token_ids, scope, tiers=tiers)

    def _scope(self, token_ids: TokenIds, namespace: str) -> Scope:
        return Scope("", namespace, self.shared_tokens(token_ids) if namespace else 0)

    def get(self, id_: str) -> Prefix | None:
        """Return the newest version that is warm on all its replicas.

        If no version is, return the newest one. The result is None if the id is unknown.
        """
        versions = self._unexpired(id_)
        if len(versions) > 1:
            return next(filter(self.is_settled, reversed(versions)), versions[-1])
        return versions[0] if versions else None

    def latest(self, id_: str) -> Prefix | None:
        """Return the newest version; None if the id is unknown."""
        return next(reversed(self._unexpired(id_)), None)

    def all(self) -> list[Prefix]:
        """Return every version of every prefix that has not expired."""
        return [prefix for id_ in self._versions for prefix in self._unexpired(id_)]

    def shared_tokens(self, token_ids: TokenIds) -> int:
        """Return how many leading tokens are full blocks of a prefix that all namespaces share."""
        if not self._shared:
            return 0
        return shared_tokens(token_ids, self._shared, self.block_size, self.store.clock.now_s())

    def is_settled(self, prefix: Prefix) -> bool:
        """Return whether the prefix was warm on all its replicas at the last poll."""
        records = assigned_records(prefix, self.records)
        return bool(records) and all(is_warm(prefix, record) for record in records)

    def count(self, prefix: Prefix, cached_tokens: int) -> None:
        """Count a prompt with this prefix, of which `cached_tokens` leading tokens were cached."""
        saved = min(cached_tokens, prefix.full_tokens(self.block_size))
        if saved:
            hits, tokens_saved = self._uses.get(prefix.id, (0, 0))
            self._uses[prefix.id] = (hits + 1, tokens_saved + saved)
            self._saved[prefix.id] += saved

    def saved_tokens(self) -> dict[str, int]:
        """Return how many tokens each prefix has saved in this router's requests, by id.

        Prefixes of tenants are left out, since other tenants may not see their names. Other threads
        may call this.
        """
        return {id_: self._saved[id_] for id_ in self._versions if TENANT_SEPARATOR not in id_}

    def unknown(self, param: str, name: str, caller: Caller = ANYONE) -> ApiError:
        """Return the 404 error for an unknown name. It suggests names that the caller may use."""
        labels = {prefix.label for prefix in self.all() if is_visible(prefix, caller)}
        similar = get_close_matches(name, sorted(labels)[:COMPARED])
        hint = (
            f"did you mean {' or '.join(map(repr, similar))}?"
            if similar
            else "see GET /v1/prefixes or kvroute prefixes list."
        )
        return ApiError(
            404,
            f"{param} is {name!r}, and no prefix of this name is declared; {hint}",
            param=param,
            code=NOT_FOUND,
        )

    def learn(self, declared: Iterable[Prefix]) -> None:
        """Replace all known versions by `declared`, which has the oldest version first."""
        versions: dict[str, list[Prefix]] = {}
        declared = list(declared)
        for prefix in declared:
            versions.setdefault(prefix.id, []).append(prefix)
        self._versions = versions
        self._shared = [prefix for prefix in declared if prefix.is_shared]
        self._saved = Counter({id_: self._saved[id_] for id_ in versions})

    async def refresh(self) -> None:
        """Read the declarations if they have changed. If Redis has lost them, restore them.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        await self._copy.refresh()

    async def flush(self) -> None:
        """Write the counts of uses to Redis.

        Raises:
            RedisError, OSError: Redis cannot be used. The counts are written later.
        """
        uses, self._uses = self._uses, {}
        if not uses:
            return
        try:
            await self.store.count(uses)
        except REDIS_ERRORS:
            for id_, (hits, saved) in uses.items():
                more = self._uses.get(id_, (0, 0))
                self._uses[id_] = (hits + more[0], saved + more[1])
            raise

    async def _declare(self, tasks: Sequence[Task], composer: PrefixComposer) -> None:
        """Declare each task as a prefix, unless a client has declared a prefix with its name."""
        for task in tasks:
            latest = self.latest(task.task_id)
            if latest is not None and "task_id" not in latest.source:
                continue
            source = task.model_dump()
            try:
                token_ids = await composer.prefix_tokens(source)
            except ApiError as error:
                log.error("cannot declare task %r as a prefix: %s", task.task_id, error)
                continue
            await self.store.declare(Prefix(task.task_id, 0, token_ids, source, is_shared=True))
        await self.refresh()

    async def _retire(self) -> None:
        """Remove old versions after a newer one was warm on all its replicas for RETIRE_S."""
        now_s = time.monotonic()
        newer = [version for versions in self._versions.values() for version in versions[1:]]
        self._settled_s = {
            version.name: self._settled_s.get(version.name, now_s)
            for version in newer
            if self.is_settled(version)
        }
        for versions in list(self._versions.values()):
            since_s = [self._settled_s.get(version.name, now_s) for version in versions]
            ages_s = [now_s - settled_s for settled_s in since_s]
            settled = [n for n, age_s in enumerate(ages_s) if n and age_s >= RETIRE_S]
            for old in versions[: settled[-1] if settled else 0]:
                await self.store.retire(old.id, old.version)

    async def _refresh_unknown(self, param: str) -> None:
        """Read the declarations again. If Redis is away, the ones that were read before stay valid.

        Raises:
            ApiError: Redis is away, and the declarations were never read.
        """
        try:
            await self.refresh()
        except REDIS_ERRORS as error:
            if self._copy.revision is None:
                raise redis_away(error, param) from None

    def _unexpired(self, id_: str) -> list[Prefix]:
        now_s = self.store.clock.now_s()
        versions = self._versions.get(id_, ())
        return [version for version in versions if not version.is_expired(now_s)]
