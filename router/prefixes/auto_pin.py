"""Hot prefixes without a name are kept warm for as long as they are hot (--auto-pin).

A promise is enough for most: engines evict such blocks late (retention.py). What a replica has
evicted nevertheless is pinned from then on.
"""

import asyncio
import contextlib
import time

from redis.exceptions import RedisError

from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.hot import Hot, HotPrefixes
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.prefixes import Prefix, own_id

CHECK_INTERVAL_S = 5.0
CANDIDATES = 20  # prefixes, the hottest first
WORTH = 0.05  # share of one replica's prefill time that a prefix has to save
COOL_S = 300.0  # after which a prefix is dropped, unless it is still hot
BUDGET = 0.5  # share of the blocks that pins may take
AUTO = "auto-"  # the start of the names


class AutoPin:
    """Declares hot prefixes for COOL_S; any router for which a prefix is still hot renews it."""

    def __init__(
        self, hot: HotPrefixes, fleet: Fleet, catalogue: Catalogue, prompts: Prompts
    ) -> None:
        self._hot = hot
        self._fleet = fleet
        self._catalogue = catalogue
        self._prompts = prompts
        self._doubtful: set[str] = set()  # names of prefixes that were lost at the last check

    async def run(self) -> None:
        """Checks and declares until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            for hot in self.worth_keeping(time.monotonic()):
                with contextlib.suppress(RedisError, OSError):  # the catalogue logs the outage
                    await self._declare(hot)

    def worth_keeping(self, now_s: float) -> list[Hot]:
        """The prefixes worth a name that fit into the BUDGET, the hottest first."""
        records = self._fleet.replicas.own_records
        room = BUDGET * min((record.facts.pin_blocks for record in records), default=0)
        chosen = []
        for hot in self._hot.top(CANDIDATES, now_s):
            prefix = self._catalogue.declared_as(hot.token_ids, hot.owner.namespace)
            if hot.blocks > room or (prefix and not prefix.label.startswith(AUTO)):
                continue
            prefill_s = self._fleet.loads.prefill_s(records[0].id, len(hot.token_ids))
            if prefill_s * hot.requests_per_s(now_s) >= WORTH:
                room -= hot.blocks
                chosen.append(hot)
        return chosen

    async def _declare(self, hot: Hot) -> None:
        name, (tenant, namespace) = f"{AUTO}{hot.end:016x}", hot.owner
        id_ = own_id(tenant, name) if tenant else name
        known = self._catalogue.latest(id_)
        is_lost = known is not None and not known.is_pinned and self._is_lost(known)
        expires_at_s = time.time() + COOL_S
        if known and not is_lost and (known.expires_at_s or 0.0) > expires_at_s - COOL_S / 2:
            return
        source = {"prompt": self._prompts.decode(hot.token_ids)}
        await self._catalogue.store.declare(
            id_,
            token_ids=hot.token_ids,
            source=source,
            is_pinned=is_lost or (known is not None and known.is_pinned),
            expires_at_s=expires_at_s,
            tenant=tenant,
            namespace=namespace,
        )
        await self._catalogue.refresh()

    def _is_lost(self, prefix: Prefix) -> bool:
        """A replica that keeps it warm has evicted some of it, at this check and the one before:
        the index may only be late, or just being read again."""
        if self._is_whole(prefix):
            self._doubtful.discard(prefix.name)
            return False
        if prefix.name in self._doubtful:
            return True
        if len(self._doubtful) >= CANDIDATES:  # most of them have cooled since
            self._doubtful.clear()
        self._doubtful.add(prefix.name)
        return False

    def _is_whole(self, prefix: Prefix) -> bool:
        """All replicas that keep it warm have all of it."""
        warm_on = {
            record.id for record in self._fleet.replicas.own_records if prefix.name in record.pins
        }
        return warm_on <= self._catalogue.holders(prefix.token_ids, prefix.namespace)
