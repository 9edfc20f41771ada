"""The named prefixes of one model in one router, which clients declare."""

from collections.abc import Coroutine
from typing import Any

from kvroute.router.dispatch.generation import Generation
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue
from kvroute.router.prefixes.declarations import Declarations
from kvroute.router.prompts.composer import PrefixComposer
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.settings.router import RouterSettings
from kvroute.store.index import Index
from kvroute.store.named_prefix import Prefix
from kvroute.store.prefixes import Prefixes


class PrefixService:
    """Owns the catalogue of named prefixes of one model."""

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
        self.declarations = Declarations(
            self.catalogue, self.composer, index.records, block_size=block_size
        )

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the background tasks by name."""
        return {"catalogue": self.catalogue.run(self._tasks_to_declare, self.composer)}

    def named_tokens(self, prefix: Prefix | None, namespace: str) -> int:
        """Return the number of tokens in the prefix's full blocks.

        It is 0 if the namespace cannot share blocks with the prefix.
        """
        if prefix is None or not (prefix.is_shared or prefix.namespace == namespace):
            return 0
        return prefix.full_tokens(self._block_size)

    def count(self, generation: Generation, prefix: Prefix | None) -> None:
        """Count the cached tokens of a prompt for its named prefix.

        Args:
            generation: the prompt's generation, which has received its first chunk.
            prefix: the prompt's named prefix.
        """
        if prefix is not None:
            self.catalogue.count(prefix, generation.cached_tokens)
