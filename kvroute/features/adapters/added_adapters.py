"""The LoRA adapters that are added while the cluster runs, in one replica.

Routers send the key and the folder of an adapter with each request for it. So a replica serves an
adapter without asking Redis. It follows the adapters in Redis for two purposes: to load those that
are to be warm before the first request, and to unload those that were removed.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

from kvroute.blocks.variants import is_key, name_of
from kvroute.contract.adapters import Adapter
from kvroute.features.adapters.adapter_files import check_digest, check_files, path_in
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.adapter_uses import Uses
from kvroute.features.adapters.added import AdapterFiles, AddedAdapter
from kvroute.replica.engine.protocol import Engine
from kvroute.store.connection import REDIS_ERRORS
from kvroute.store.revision import Follower

log = logging.getLogger("kvroute.replica")

POLL_S = 0.5  # seconds between two reads of Redis


class AddedAdapters:
    """Admits, warms and drops the added adapters of all ranks of a replica."""

    def __init__(
        self,
        engines: Sequence[Engine],
        store: Adapters,
        *,
        root: Path | None,
        max_rank: int,
        on_change: Callable[[], None],
    ) -> None:
        """Create the adapters of a replica.

        Args:
            engines: The replica's ranks.
            store: The added adapters in Redis.
            root: The folder that has all adapters; None: none can be added.
            max_rank: The highest rank of an adapter.
            on_change: Called when the list of loaded adapters has changed.
        """
        self._engines = engines
        self._added = Follower(store, restores=False)
        self._root = root
        self._max_rank = max_rank
        self._on_change = on_change
        self._admitting = asyncio.Lock()
        # Keys of the admitted adapters -> time of the latest use on the monotonic clock.
        self._used_s: dict[str, float] = {}
        self._uses = Uses()
        self._warmed: set[str] = set()  # keys of the adapters that were loaded in advance
        self._checks = 0  # number of checks so far

    @asynccontextmanager
    async def using(self, adapter: Adapter) -> AsyncIterator[None]:
        """Admit the adapter of a request, and keep it admitted while the request runs.

        Raises:
            ValueError: The adapter's files cannot be used.
        """
        with self._in_use(adapter.name):
            await self._admit(adapter)
            yield

    async def check(self, adapter: Adapter, rank: int) -> AdapterFiles:
        """Check an adapter's files, load it on one rank, and unload it again."""
        self._checks += 1
        engine, name = self._engines[rank], f"{adapter.name} (check {self._checks})"
        try:
            folder = self._folder(adapter.path)
            assert self._root
            files = await asyncio.to_thread(
                check_files, folder, self._root, max_rank=self._max_rank
            )
            engine.admit_adapter(Adapter(name=name, path=folder))
            try:
                await engine.load_adapter(name)
            finally:
                await engine.drop_adapter(name)
        except ValueError as error:
            return AdapterFiles(problem=str(error).replace(name, adapter.name))
        finally:
            self._on_change()
        return files

    async def run(self) -> None:
        """Warm and drop adapters as they are added and removed, until cancelled."""
        while True:
            with suppress(*REDIS_ERRORS):  # the publisher logs the outage
                await self._added.refresh()
            await self._drop_removed()
            await self._warm()
            await asyncio.sleep(POLL_S)

    async def _admit(self, adapter: Adapter) -> None:
        if adapter.name in self._used_s:
            return
        async with self._admitting:
            if adapter.name in self._used_s:
                return
            if not is_key(adapter.name):
                raise ValueError(f"{adapter.name[:80]!r} is not the key of an adapter")
            try:
                self._folder(adapter.path)
                await asyncio.to_thread(check_digest, adapter)
            except ValueError as error:
                raise ValueError(
                    f"the LoRA adapter {name_of(adapter.name)!r} cannot be loaded from "
                    f"{adapter.path}: {error}"
                ) from None
            for engine in self._engines:
                engine.admit_adapter(adapter, check=check_digest)
            self._used_s[adapter.name] = time.monotonic()

    @contextmanager
    def _in_use(self, key: str) -> Iterator[None]:
        try:
            with self._uses.use(key):
                yield
        finally:
            if key in self._used_s:
                self._used_s[key] = time.monotonic()

    def _folder(self, path: str) -> str:
        """Return the absolute path of an adapter's folder.

        Raises:
            ValueError: It is not in the folder of adapters.
        """
        if self._root is None:
            raise ValueError("no adapters can be added; start the cluster with --lora-root FOLDER")
        return path_in(self._root, path)

    async def _drop_removed(self) -> None:
        """Unload the adapters that were removed, once no request of this replica uses them.

        An adapter that was used after the last read began may have been added since then.
        """
        added = {adapter.key for adapter in self._added.values}
        for key, used_s in list(self._used_s.items()):
            if key in added or self._uses.of(key) or used_s >= self._added.complete_s:
                continue
            async with self._admitting:
                if self._uses.of(key):
                    continue
                del self._used_s[key]
                for engine in self._engines:
                    await engine.drop_adapter(key)
            self._on_change()

    async def _warm(self) -> None:
        """Load each adapter that is to be warm once; the latest ones if memory is too small."""
        warm = [each for each in self._added.values if each.is_warm and not each.is_leaving]
        self._warmed &= {adapter.key for adapter in warm}
        for adapter in warm[-self._engines[0].facts.max_variants :]:
            if adapter.key not in self._warmed:
                self._warmed.add(adapter.key)
                await self._load(adapter)

    async def _load(self, adapter: AddedAdapter) -> None:
        try:
            with self._in_use(adapter.key):
                await self._admit(adapter.as_adapter)
                for engine in self._engines:
                    await engine.load_adapter(adapter.key)
        except ValueError as error:
            log.warning("LoRA adapter %s is not warm: %s", adapter.name, error)
        self._on_change()
