"""One router's parts, for one model, that know of the prefixes which prompts share."""

import time
from collections.abc import Coroutine
from typing import Any

from replica.kvindex.index import Index
from replica.kvindex.prefixes import Prefix, Prefixes
from router.api.prompt import Prompts
from router.named.auto_pin import AutoPin
from router.named.declarations import Declarations
from router.named.demand import Demand
from router.named.hot import HotPrefixes
from router.named.hottest import Hottest
from router.named.joint import Joint
from router.named.prefixes import Catalogue
from router.routing.fleet import Fleet
from router.settings import RouterSettings
from router.streams.dispatch import Generation


class PrefixParts:
    """Named prefixes, and those that save most, named or not."""

    def __init__(
        self,
        settings: RouterSettings,
        store: Prefixes,
        index: Index,
        fleet: Fleet,
        prompts: Prompts,
    ) -> None:
        block_size = settings.block_size
        self._settings = settings
        self.joint = Joint(prompts)
        self.catalogue = Catalogue(store, fleet, block_size=block_size)
        self.declarations = Declarations(
            self.catalogue, self.joint, index.records, block_size=block_size
        )
        self._demand = Demand(self.catalogue, fleet)
        self._hot = HotPrefixes(block_size=block_size)
        self.hottest = Hottest(self._hot, fleet, self.catalogue, prompts)
        self._auto_pin = AutoPin(self._hot, fleet, self.catalogue, prompts)

    def work(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What keeps them current for as long as it runs, by name."""
        work = {
            "demand": self._demand.run(),
            "catalogue": self.catalogue.run(self._settings.tasks, self.joint),
        }
        if self._settings.auto_pin:
            work["auto-pin"] = self._auto_pin.run()
        return work

    def named_tokens(self, prefix: Prefix | None) -> int:
        """Its tokens in whole blocks."""
        block_size = self._settings.block_size
        return prefix.full_blocks(block_size) * block_size if prefix else 0

    def count(self, generation: Generation, prefix: Prefix | None, *, is_apart: bool) -> None:
        """A prompt has its first token: what it took from caches counts for its prefixes. One that
        shares nothing, by its salt or its adapter, makes no prefix hot."""
        if prefix is not None:
            self.catalogue.count(prefix, generation.cached_tokens)
            self._demand.count(prefix)
        if not is_apart:
            chain, now_s = generation.placement.chain, time.monotonic()
            self._hot.see(generation.token_ids, chain, generation.cached_tokens, now_s)
