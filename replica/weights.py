"""Loads other weights into a replica's engines, as Redis says (store/weights.py).

Each replica follows the record of the weights in Redis, so an update needs no router to go on. Few
replicas load at the same time, so that the others serve requests. Before a replica loads, it leaves
the index and finishes its requests. Afterwards it registers again, as new and without blocks.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from redis.exceptions import RedisError

from kvroute.replica.engine.pause import Pause
from kvroute.replica.engine.protocol import Engine
from kvroute.store.weights import PLACE_S, WeightsStore
from kvroute.weights.files import OPTION, check_weights, folder_in
from kvroute.weights.version import MAX_PROBLEM, FleetWeights, ReplicaProblem

log = logging.getLogger("kvroute.replica")

POLL_S = 0.5  # seconds between two reads of Redis
RETRY_S = 10.0  # seconds until a replica that could not load weights tries it again
# Attempts after which routers forget why a replica cannot load weights, unless it fails again.
KEPT_ATTEMPTS = 3
MAX_START_S = 30.0  # seconds that a starting replica waits for Redis


class ReplicaWeights:
    """The weights of all ranks of a replica."""

    def __init__(
        self,
        engines: Sequence[Engine],
        store: WeightsStore,
        *,
        replica_id: str,
        root: Path | None,
        model: Path | None,
        pause: Pause,
        on_load: Callable[[], None],
    ) -> None:
        """Create the weights of a replica.

        Args:
            engines: The replica's ranks.
            store: The weights in Redis.
            replica_id: The replica's id.
            root: The folder that has all weights; None: they cannot be updated.
            model: The folder with the weights of the start; None: the engines have none.
            pause: The pause of the engines.
            on_load: Called when the engines have loaded other weights, before the pause ends.
        """
        self._engines = engines
        self._store = store
        self._replica_id = replica_id
        self._root = root
        self._model = model
        self._pause = pause
        self._on_load = on_load
        self._revision = 0  # revision of the record that was read last
        self._wanted: FleetWeights | None = None  # the latest record; None: none was read yet
        self._retry_s = 0.0  # time of the next attempt after a failed one, on the monotonic clock

    async def start(self) -> None:
        """Load the current weights, if another replica has, into engines that have just started.

        Raises:
            ValueError: They cannot be loaded. The other replicas go on.
        """
        if self._root is None:
            return
        ends_s = time.monotonic() + MAX_START_S
        while not await self._read() and time.monotonic() < ends_s:
            await asyncio.sleep(POLL_S)
        if self._wanted is None:
            log.warning("Redis is away, so this replica starts with the weights of --model")
        elif self._wanted.proven.key:
            await self._load(self._wanted.proven)

    async def run(self) -> None:
        """Load weights as the record in Redis changes, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._read()
            if self._wanted is not None:
                with contextlib.suppress(RedisError, OSError):
                    await self._follow(self._wanted)

    async def _follow(self, wanted: FleetWeights) -> None:
        if wanted.key == self._engines[0].facts.weights:
            if not wanted.is_proven:
                await self._store.prove(wanted.key)
        elif time.monotonic() >= self._retry_s:
            async with self._place(wanted) as has_place:
                if has_place:
                    await self._update(wanted)

    async def check(self, path: str) -> str:
        """Return why weights cannot be loaded from a folder; empty: they seem to fit."""
        try:
            await asyncio.to_thread(self._check, path)
        except ValueError as error:
            return str(error)
        return ""

    def _check(self, path: str) -> None:
        """Raise ValueError if the weights in a folder are not allowed or do not fit."""
        if self._root is None:
            raise ValueError(f"weights cannot be updated; start the cluster with {OPTION} FOLDER")
        if not self._engines[0].can_load_weights:
            kind = self._engines[0].facts.engine
            raise ValueError(f"an engine of the kind {kind!r} cannot load other weights")
        check_weights(Path(folder_in(self._root, path)), self._root, self._model)

    async def _read(self) -> bool:
        """Read the record if it has changed; return whether Redis has answered."""
        try:
            revision = await self._store.revision()
            if revision != self._revision:
                # Without a revision, Redis has lost the record, and a router will restore it.
                read = await self._store.read() if revision else self._wanted
                self._wanted, self._revision, self._retry_s = read or self._wanted, revision, 0.0
            elif self._wanted is None:
                self._wanted = await self._store.read()
        except (RedisError, OSError):
            return False  # the publisher logs the outage
        return True

    @asynccontextmanager
    async def _place(self, wanted: FleetWeights) -> AsyncIterator[bool]:
        """Take one of the places of replicas that may load now; yield False if there is none."""
        places = wanted.at_once if wanted.is_proven else 1
        if not await self._store.take_place(self._replica_id, places):
            yield False
            return
        keeping = asyncio.create_task(self._keep_place(places))
        try:
            yield True
        finally:
            keeping.cancel()
            await self._store.leave_place(self._replica_id)

    async def _keep_place(self, places: int) -> None:
        while True:
            await asyncio.sleep(PLACE_S / 3)
            with contextlib.suppress(RedisError, OSError):
                await self._store.take_place(self._replica_id, places)

    async def _update(self, wanted: FleetWeights) -> None:
        """Pause the engines and load weights; if these do not fit, keep the old ones."""
        name = wanted.current.name if wanted.current else "of the start"
        try:
            if wanted.current:
                await asyncio.to_thread(self._check, wanted.current.source)
        except ValueError as error:
            await self._give_up(wanted, error)
            return
        log.info("this replica finishes its requests, and then loads the weights %s", name)
        async with self._pause.begin(f"it loads the weights {name}"):
            await self._load(wanted)

    async def _load(self, wanted: FleetWeights) -> None:
        """Load weights into engines that run no requests.

        Raises:
            ValueError: They cannot be loaded, and the engines cannot be used any more.
        """
        source, began_s = str(self._model or ""), time.monotonic()
        try:
            if wanted.current:
                source = wanted.current.source
                await asyncio.to_thread(self._check, source)
            for engine in self._engines:
                await engine.load_weights(source, wanted.key)
        except Exception as error:  # vLLM raises errors of its engine as plain Exception
            await self._give_up(wanted, error)
            raise ValueError(f"the weights in {source} cannot be loaded: {error}") from error
        self._on_load()
        log.info("loaded the weights in %s in %.1f s", source, time.monotonic() - began_s)

    async def _give_up(self, wanted: FleetWeights, error: Exception) -> None:
        log.warning("the weights %s cannot be loaded: %s", wanted.key or "of the start", error)
        self._retry_s = time.monotonic() + RETRY_S
        problem = ReplicaProblem(key=wanted.key, problem=str(error)[:MAX_PROBLEM])
        with contextlib.suppress(RedisError, OSError):
            await self._store.fail(wanted.key, str(error))
            await self._store.report(self._replica_id, problem, for_s=KEPT_ATTEMPTS * RETRY_S)
