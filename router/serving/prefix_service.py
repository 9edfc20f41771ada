"""One model's prefixes in one router: named prefixes, hot prefixes, and prompts that use them."""

import time
from collections.abc import Coroutine
from typing import Any

from kvroute.keys.keyring import Caller
from kvroute.keys.limits import TenantLimits
from kvroute.router.api.declaration import PrefixDeclaration
from kvroute.router.dispatch.dispatcher import Generation
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.declarations import Declarations
from kvroute.router.prefixes.hot import HotPrefixes, Owner
from kvroute.router.prefixes.hottest import Hottest
from kvroute.router.prompts.composer import PrefixComposer
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.settings.router import RouterSettings
from kvroute.store.index import Index
from kvroute.store.prefixes import Prefix, Prefixes


class PrefixService:
    """Owns the catalogue of named prefixes and the counts of hot ones."""

    def __init__(
        self,
        settings: RouterSettings,
        store: Prefixes,
        index: Index,
        fleet: Fleet,
        tokenizer: Prompts,
    ) -> None:
        block_size = settings.block_size
        self._block_size = block_size
        self._tasks_to_declare = settings.tasks
        self.catalogue = Catalogue(store, fleet, block_size=block_size)
        self.composer = PrefixComposer(tokenizer)
        self._declarations = Declarations(
            self.catalogue, self.composer, index.records, block_size=block_size
        )
        self._hot = HotPrefixes(block_size=block_size)
        self._hottest = Hottest(self._hot, fleet, self.catalogue, tokenizer)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """The background tasks by name."""
        return {"catalogue": self.catalogue.run(self._tasks_to_declare, self.composer)}

    # Requests.

    def named_tokens(self, prefix: Prefix | None, namespace: str) -> int:
        """The prefix's tokens in whole blocks that prompts of this namespace share."""
        if prefix is None or not (prefix.is_shared or prefix.namespace == namespace):
            return 0
        return prefix.full_tokens(self._block_size)

    def count(self, generation: Generation, prefix: Prefix | None, owner: Owner | None) -> None:
        """Counts the cached tokens of a prompt with a first token for its prefixes. Without an
        owner it makes no prefix hot."""
        if prefix is not None:
            self.catalogue.count(prefix, generation.cached_tokens)
        if owner is not None:
            self._hot.see(
                generation.token_ids,
                generation.placement.chain,
                generation.cached_tokens,
                time.monotonic(),
                generation.features,
                owner,
                generation.placement.shared_tokens,
            )

    # The API.

    async def declare(
        self,
        declaration: PrefixDeclaration,
        caller: Caller | None,
        *,
        max_model_len: int,
        limits: TenantLimits | None,
    ) -> tuple[dict[str, Any], bool]:
        """The prefix as GET returns it, and whether this call made a new version of it."""
        return await self._declarations.declare(
            declaration, caller, max_model_len=max_model_len, limits=limits
        )

    async def all(self, caller: Caller | None) -> list[dict[str, Any]]:
        """The latest version of each name, in the order of their declarations."""
        return await self._declarations.list(caller)

    async def get(self, name: str, caller: Caller | None) -> dict[str, Any]:
        """The latest version of that name; ApiError when there is none."""
        return await self._declarations.get(name, caller)

    async def drop(self, name: str, caller: Caller | None) -> dict[str, Any]:
        """Drops all versions of that name; ApiError when there is none."""
        return await self._declarations.drop(name, caller)

    def hottest(self, tenant: str = "") -> list[dict[str, Any]]:
        """The prefixes that saved most recently, named or not, best first, as that tenant may see
        them."""
        return self._hottest.top(tenant)
