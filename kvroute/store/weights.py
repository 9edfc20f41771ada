"""The weights that the replicas of one model should have, as stored in Redis.

TAG is CLUSTER/MODEL, as in index.py:

    kvroute:{TAG}:weights           string  JSON of FleetWeights; none: the weights of the start
    kvroute:{TAG}:weights:revision  string  a number that is new after each change
    kvroute:{TAG}:weights:loading   zset    ids of the replicas that load weights now; the score is
                                            the time in milliseconds when this place is free again
    kvroute:{TAG}:weights:problem:REPLICA
                                    string  JSON of ReplicaProblem: why the replica cannot load the
                                            weights; it expires unless the replica renews it

The weights have no lease: a cluster that is started again has them, if Redis keeps its data.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.store.connection import with_timeout
from kvroute.store.revision import RevisedStore
from kvroute.weights.version import (
    MAX_PROBLEM,
    START,
    Failure,
    FleetWeights,
    ReplicaProblem,
    Weights,
    decode,
    decode_problem,
    encode,
    encode_problem,
)

PLACE_S = 6.0  # seconds after which the place of a replica is free, unless it takes it again

# KEYS loading; ARGV replica, places, milliseconds. Take or renew a place. Return 1 if it has one.
_TAKE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if not redis.call('ZSCORE', KEYS[1], ARGV[1])
    and redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[2]) then return 0 end
redis.call('ZADD', KEYS[1], now + ARGV[3], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class UpdateRunningError(Exception):
    """Another update has just begun."""


class WeightsStore(RevisedStore[FleetWeights]):
    """The weights of one model of one cluster.

    All methods raise RedisError or OSError if Redis is unreachable.
    """

    NAME = "weights"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._loading = f"{self._values}:loading"
        self._take = self._redis.register_script(_TAKE)

    @with_timeout
    async def read(self) -> FleetWeights | None:
        """Return the record; None: it is unreadable. A missing record is START."""
        return self._decode(await self._redis.get(self._values))

    @with_timeout
    async def update(self, weights: Weights, *, at_once: int, before: FleetWeights) -> FleetWeights:
        """Let all replicas load these weights, and return the new record.

        Args:
            weights: the weights; their number is replaced by a new one.
            at_once: replicas that may load at the same time.
            before: the record as it must be now.

        Raises:
            UpdateRunningError: the record is another one.
        """

        async def change(pipe: Any) -> FleetWeights:
            if (now := await self._now(pipe)) != before:
                raise UpdateRunningError
            number = await self._next_revision(pipe)
            after = FleetWeights(
                current=replace(weights, number=number), previous=now.current, at_once=at_once
            )
            self._set(pipe, number, after)
            return after

        after: FleetWeights = await self._transaction(change)
        return after

    @with_timeout
    async def prove(self, key: str) -> None:
        """Record that a replica has loaded the weights with this key."""
        await self._change(key, lambda now: replace(now, is_proven=True))

    @with_timeout
    async def fail(self, key: str, problem: str) -> None:
        """Let replicas go back to the previous weights, unless some replica has loaded these."""

        def back(now: FleetWeights) -> FleetWeights:
            if now.is_proven or now.current is None:
                return now
            failure = Failure(weights=now.current, problem=problem[:MAX_PROBLEM])
            return FleetWeights(
                current=now.previous, is_proven=True, at_once=now.at_once, failure=failure
            )

        await self._change(key, back)

    @with_timeout
    async def take_place(self, replica: str, places: int) -> bool:
        """Take or renew the place of a replica that loads weights; return False if all are taken.

        Args:
            replica: the replica's id.
            places: replicas that may load at the same time.
        """
        args = [replica, places, round(1000 * PLACE_S)]
        return bool(await self._take(keys=[self._loading], args=args))

    @with_timeout
    async def leave_place(self, replica: str) -> None:
        await self._redis.zrem(self._loading, replica)

    @with_timeout
    async def report(self, replica: str, problem: ReplicaProblem, *, for_s: float) -> None:
        """Record why a replica cannot load weights, for so many seconds."""
        packed = encode_problem(problem)
        await self._redis.set(self._problem(replica), packed, px=round(1000 * for_s))

    @with_timeout
    async def problems(self, replicas: Sequence[str]) -> dict[str, ReplicaProblem]:
        """Return why some of these replicas cannot load weights: replica -> problem."""
        if not replicas:
            return {}
        found = await self._redis.mget([self._problem(replica) for replica in replicas])
        return {
            replica: problem
            for replica, packed in zip(replicas, found, strict=True)
            if packed is not None and (problem := self._decode_problem(replica, packed))
        }

    def _problem(self, replica: str) -> str:
        return f"{self._values}:problem:{replica}"

    def _decode_problem(self, replica: str, packed: bytes) -> ReplicaProblem | None:
        try:
            return decode_problem(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add("weights", replica, error)
            return None

    async def _change(self, key: str, changed: Callable[[FleetWeights], FleetWeights]) -> None:
        """Change the record if it has the weights with this key."""

        async def change(pipe: Any) -> None:
            now = await self._now(pipe)
            after = changed(now)
            if now.key == key and after != now:
                await self._write(pipe, after)

        await self._transaction(change)

    async def _now(self, pipe: Any) -> FleetWeights:
        return self._decode(await pipe.get(self._values)) or START

    async def _write(self, pipe: Any, record: FleetWeights) -> None:
        self._set(pipe, await self._next_revision(pipe), record)

    def _set(self, pipe: Any, revision: int, record: FleetWeights) -> None:
        pipe.multi()
        pipe.set(self._revision, revision)
        pipe.set(self._values, encode(record))

    def _decode(self, packed: bytes | None) -> FleetWeights | None:
        if packed is None:
            return START
        try:
            return decode(packed)
        except DECODE_ERRORS as error:
            self.unreadable.add("weights", "", error)
            return None
