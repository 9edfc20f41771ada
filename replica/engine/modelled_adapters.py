"""The LoRA adapters of a simulated engine, which has no weights: only their loading is modelled."""

import asyncio
from collections.abc import Iterable

from kvroute.blocks.variants import VariantCache
from kvroute.contract.adapters import Adapter


class ModelledAdapters(VariantCache):
    """Which adapters an engine knows, and which of them it has in memory."""

    def __init__(
        self, names: Iterable[str], *, in_memory: int, load_s: float, can_add: bool
    ) -> None:
        """Create the adapters of an engine.

        Args:
            names: The adapters that the engine knows from its start.
            in_memory: The maximum number of adapters in memory.
            load_s: The seconds to load an adapter.
            can_add: Whether other adapters can be admitted later.
        """
        super().__init__(in_memory)
        self._named = sorted(names)  # the adapters of --lora, which all clients may know
        self._known = set(self._named)
        self._load_s = load_s
        self._can_add = can_add

    def check(self, name: str) -> None:
        """Raise ValueError if requests cannot ask for this adapter. Empty: the base model."""
        if name and name not in self._known:
            names = ", ".join(self._named)
            raise ValueError(f"this replica has no LoRA adapter {name!r}; it has {names}")

    def admit(self, adapter: Adapter) -> None:
        """See Engine.admit_adapter."""
        if not self._can_add:
            raise ValueError("this engine cannot load adapters after its start")
        self._known.add(adapter.name)

    async def load(self, name: str) -> None:
        """See Engine.load_adapter."""
        self.check(name)
        if name not in self:
            await asyncio.sleep(self._load_s)
        self.use(name)

    def forget(self, name: str) -> None:
        """See Engine.drop_adapter."""
        self._known.discard(name)
        self.drop(name)

    def loading_s(self, names: Iterable[str]) -> float:
        """Load these adapters, and return the seconds that this takes. Empty: the base model."""
        return self._load_s * sum(map(self.use, {name for name in names if name}))
