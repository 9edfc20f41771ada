"""The connection to Redis, the timeout of each call, outages, and the base of a model's stores."""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ParamSpec, TypeVar

import redis.asyncio as redis
from redis.exceptions import MasterDownError, OutOfMemoryError, ReadOnlyError, RedisError

from kvroute.contract.unreadable import Unreadable
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

REDIS_ERRORS = (RedisError, OSError)  # what a call to Redis raises during an outage
OLDEST_REDIS = (6, 2)  # oldest version of Redis with all commands that kvroute's scripts use
SAFE_POLICY = "noeviction"  # the only maxmemory-policy with which Redis keeps the whole index
TIMEOUT_S = 5.0  # timeout of one call to Redis, in seconds
# A clock has jumped if a reading differs by so many seconds from the expected one. A call to Redis
# cannot take so long.
JUMP_S = 2 * TIMEOUT_S
# What users are told about a cluster whose Redis is away.
WITHOUT_REDIS = "requests are answered meanwhile, with fewer cache hits"

# A Redis that answers, but refuses writes for now: name of its error -> its state, and the remedy.
REFUSALS = {
    "OOM": ("is full", "raise the maxmemory of Redis"),
    "MISCONF": ("cannot save to its disk", "free the disk of Redis; its log has the reason"),
    "READONLY": ("is a replica", "set --redis-url to its primary"),
    "MASTERDOWN": ("has lost its primary", "set --redis-url to its primary"),
    "NOREPLICAS": ("has too few replicas", "start the replicas of Redis"),
}
# redis-py has classes for some of these errors, whose messages do not begin with the name. Errors
# of scripts have the name in their message.
REFUSED: dict[type[Exception], str] = {
    OutOfMemoryError: "OOM",
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
}


def refusal(error: Exception) -> tuple[str, str] | None:
    """Return the state of a Redis that refuses writes for now, and the remedy.

    Returns:
        None if the error has another cause.
    """
    name = REFUSED.get(type(error)) or next((n for n in REFUSALS if f"{n} " in str(error)), None)
    return REFUSALS[name] if name else None


def connect(url: str) -> "redis.Redis":
    """Return a client, which connects at its first use. Raises ValueError for an invalid URL."""
    return redis.from_url(
        url,
        protocol=2,  # with protocol 2, every version of Redis sends the same types of replies
        socket_connect_timeout=TIMEOUT_S,
        # With a timeout here, redis-py would write under asyncio.wait_for, which before Python 3.12
        # can lose a cancellation. `with_timeout` below limits every call instead.
        socket_timeout=None,
    )


class Outage:
    """The outages of Redis that one component observes. Each is logged at its begin and its end."""

    def __init__(self, log: logging.Logger, effect: str) -> None:
        self._log = log
        self._effect = effect  # what the component does during the outage; part of the log line
        self._began_s: float | None = None  # start of the outage on the monotonic clock

    @property
    def is_on(self) -> bool:
        return self._began_s is not None

    def begin(self, error: Exception) -> None:
        """Record a failed call to Redis."""
        if self._began_s is None:
            self._began_s = time.monotonic()
            self._log.warning("Redis is away (%r); %s", error, self._effect)

    def end(self) -> None:
        """Record a successful call to Redis."""
        if self._began_s is not None:
            self._log.warning("Redis is back after %.1f s", time.monotonic() - self._began_s)
            self._began_s = None


class SharedClock:
    """The time that all processes of a cluster share: the clock of Redis.

    Between two readings it goes on with the monotonic clock. Before the first one it is the clock
    of this machine. If the clock of one machine jumps, the shared time does not: a reading of Redis
    counts only if it agrees with the earlier readings or with the clock of this machine.
    """

    def __init__(self) -> None:
        # Seconds by which the shared time is ahead of the monotonic clock; None: never read.
        self._ahead_s: float | None = None

    def now_s(self) -> float:
        """Return the shared Unix time."""
        return time.time() if self._ahead_s is None else time.monotonic() + self._ahead_s

    def update(self, reading: tuple[int, int] | Exception) -> None:
        """Take over a reading of Redis.

        Args:
            reading: Seconds and microseconds, as the command TIME returns; or its error, since some
                services forbid the command.
        """
        if isinstance(reading, Exception):
            return
        redis_s = reading[0] + reading[1] / 1e6
        known = (self.now_s(), time.time())
        if self._ahead_s is None or any(abs(redis_s - each) < JUMP_S for each in known):
            self._ahead_s = redis_s - time.monotonic()


P = ParamSpec("P")
T = TypeVar("T")


def with_timeout(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Limit a call to TIMEOUT_S. After that, it raises TimeoutError, which is an OSError."""

    @functools.wraps(call)
    async def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        async with asyncio.timeout(TIMEOUT_S):
            return await call(*args, **kwargs)

    return bounded


@dataclass(eq=False, repr=False)
class ModelStore:
    """A part of what one model of one cluster has in Redis; the base of the classes that use it."""

    client: "redis.Redis"
    model: str = ""  # empty: the values belong to the whole cluster
    _: KW_ONLY
    cluster: str = DEFAULT_CLUSTER
    unreadable: Unreadable = field(default_factory=Unreadable)  # counts unreadable data in Redis

    def __post_init__(self) -> None:
        # redis-py's types are unions of all protocol versions' replies.
        self._redis: Any = self.client
        self._prefix = key_prefix(self.cluster, self.model)
