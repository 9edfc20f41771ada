"""Updates the weights of one model on all replicas, as operators ask.

Routers only write and read the record of the weights in Redis; replicas follow it by themselves
(replica/weights.py). So an update goes on if the router that began it dies.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import RedisError

from kvroute.adapters.added import MAX_PATH
from kvroute.process.outage import Outage
from kvroute.router.api.errors import ApiError, invalid, needing_redis, shown
from kvroute.router.dispatch.questions import Questions
from kvroute.router.placement.replicas import ReplicaRegistry
from kvroute.settings.router import RouterSettings
from kvroute.store.weights import UpdateRunningError, WeightsStore
from kvroute.weights.files import OPTION, folder_in
from kvroute.weights.version import (
    NAME,
    START,
    FleetWeights,
    Weights,
    encode_source,
    name_in,
)
from kvroute.wording import plural

log = logging.getLogger("kvroute.weights")

CHECK_S = 60.0  # seconds that a replica has to read the headers of the files
WAIT_S = 50.0  # seconds that a client waits for the end of an update
FOLLOW_S = 0.5  # seconds between two checks of Redis for changes
POLL_S = 0.2  # seconds between two checks of an update for which a client waits


class NewWeights(BaseModel):
    """The body of POST /v1/weights."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(max_length=MAX_PATH)
    version: str | None = Field(None, max_length=256)  # None: the name of the folder
    at_once: int = Field(1, ge=1, le=2**20)  # replicas that may load at the same time
    wait: bool = True  # whether the answer waits until all replicas have the weights
    model: str | None = None  # the model to update, if there are several


class WeightsUpdates:
    """The updates of one model's weights."""

    def __init__(
        self,
        store: WeightsStore,
        questions: Questions,
        replicas: ReplicaRegistry,
        settings: RouterSettings,
        running: Callable[[], Collection[str]],
    ) -> None:
        """Create the updates of a model.

        Args:
            store: the record in Redis.
            questions: asks a replica whether weights fit.
            replicas: the replicas' records.
            settings: the settings for this model.
            running: returns the ids of the replicas that Ray Serve runs.
        """
        self._store = store
        self._questions = questions
        self._replicas = replicas
        self._settings = settings
        self._running = running
        self._record = START
        self._revision = 0
        self._outage = Outage(log, "the record of the weights stays as it is")

    async def run(self) -> None:
        """Follow the record in Redis, and restore it if Redis has lost it, until cancelled."""
        while True:
            try:
                await self._refresh()
                self._outage.end()
            except (RedisError, OSError) as error:
                self._outage.begin(error)
            await asyncio.sleep(FOLLOW_S)

    async def update(self, new: NewWeights) -> tuple[bool, dict[str, Any]]:
        """Let all replicas load other weights, and wait for that if `new` says so.

        Returns:
            Whether all replicas have the weights now, and the state of the fleet. The update goes
            on if not.

        Raises:
            ApiError: the weights cannot be loaded; replicas keep the old ones or go back to them.
        """
        weights = self._checked(new)
        with needing_redis():
            await self._refresh()
        before = self._record
        self._refuse_during_update(before)
        order = encode_source(weights.source)
        packed = await self._questions.ask("check_weights", order, within_s=CHECK_S)
        if problem := packed.decode(errors="replace"):
            raise _unusable(new.source, problem)
        with needing_redis():
            try:
                after = await self._store.update(weights, at_once=new.at_once, before=before)
            except UpdateRunningError:
                raise _still_running("another update has just begun") from None
        self._record = after
        if not new.wait:
            return False, self._state()
        ends_s = time.monotonic() + WAIT_S
        while time.monotonic() < ends_s:
            await asyncio.sleep(POLL_S)
            await self._refresh_if_possible()
            failure = self._record.failure
            if failure and failure.weights.key == after.key:
                raise _unusable(new.source, failure.problem)
            if self._is_done() and self._record.key == after.key:
                return True, self._state()
        return False, await self.state()

    async def state(self) -> dict[str, Any]:
        """Return the weights of the fleet and of each replica. Without Redis: as last read."""
        if self._settings.weights_root is not None:
            await self._refresh_if_possible()
            return self._state(await self._problems())
        return self._state()

    def _state(self, problems: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the weights of the fleet and of each replica.

        Args:
            problems: why replicas cannot load the weights of the record: replica -> reason.
        """
        record, found = self._record, self._by_replica()
        failure, problems = record.failure, problems or {}
        return {
            **_described(record.current),
            "state": "ready" if self._is_done() else "updating",
            "failed": failure and {**_described(failure.weights), "problem": failure.problem},
            "replicas": [
                {
                    "id": id_,
                    # None: the replica finishes its requests, loads weights, or has just started.
                    "version": None if key is None else name_in(key),
                    "key": key,
                    "problem": problems.get(id_),
                }
                for id_, key in sorted(found.items())
            ],
        }

    async def _problems(self) -> dict[str, str]:
        """Return why replicas cannot load the weights of the record. Without Redis: nothing."""
        try:
            found = await self._store.problems(self._behind())
        except (RedisError, OSError) as error:
            log.debug("the problems of the replicas cannot be read: %s", error)
            return {}
        return {id_: each.problem for id_, each in found.items() if each.key == self._record.key}

    def _by_replica(self) -> dict[str, str | None]:
        """Return the key of each replica's weights; None: the replica is not in the index."""
        keys: dict[str, str | None] = {}
        for id_ in self._running():
            ranks = map(self._replicas.get, self._replicas.ranks_of(id_))
            keys[id_] = next((rank.facts.weights for rank in ranks if rank), None)
        return keys

    def _behind(self) -> Sequence[str]:
        """Return the replicas that do not have the weights of the record yet."""
        return [id_ for id_, key in self._by_replica().items() if key != self._record.key]

    def _is_done(self) -> bool:
        return self._record.is_proven and not self._behind()

    def _refuse_during_update(self, record: FleetWeights) -> None:
        behind = self._behind()
        if not record.is_proven or behind:
            count = plural(len(behind), "replica")
            raise _still_running(
                f"{count} of the last update {'has' if len(behind) == 1 else 'have'} "
                "not loaded its weights yet"
            )

    def _checked(self, new: NewWeights) -> Weights:
        """Return the new weights, before they have a number.

        Raises:
            ApiError: weights cannot be updated here, or the name or the path is not allowed.
        """
        root = self._settings.weights_root
        if root is None:
            raise ApiError(
                400,
                "the weights of this cluster cannot be updated; start it with "
                f"{OPTION} FOLDER, where FOLDER has all weights",
                code="unsupported_parameter",
            )
        try:
            source = folder_in(root, new.source)
        except ValueError as error:
            raise invalid("source", f"source is {shown(new.source)}; {error}") from None
        name = source.rpartition("/")[2] if new.version is None else new.version
        if not re.fullmatch(NAME, name):
            raise invalid(
                "version",
                f"version is {shown(name)}; expected 1 to 64 letters, digits and the characters "
                ". _ -, beginning with a letter or a digit",
            )
        return Weights(name=name, number=0, source=source, created_s=time.time())

    async def _refresh_if_possible(self) -> None:
        try:
            await self._refresh()
        except (RedisError, OSError) as error:
            log.debug("the record of the weights cannot be read: %s", error)

    async def _refresh(self) -> None:
        revision = await self._store.revision()
        if not revision and self._revision:
            await self._store.restore(self._record)
            revision = await self._store.revision()
        if revision != self._revision:
            self._record = await self._store.read() or self._record
            self._revision = revision


def _described(weights: Weights | None) -> dict[str, Any]:
    return {
        "version": weights.name if weights else "",  # empty: the weights of the start
        "key": weights.key if weights else "",
        "source": weights and weights.source,
        "created": weights and int(weights.created_s),
    }


def _unusable(source: str, problem: str) -> ApiError:
    return invalid("source", f"source is {shown(source)}: {problem}. The old weights go on serving")


def _still_running(reason: str) -> ApiError:
    return ApiError(
        409,
        f"an update of the weights is running: {reason}; try again when GET /v1/weights, or "
        "kvroute weights show, says ready",
        code="weights_update_running",
    )
