"""The connection to Redis, the timeout of each call, and the base of the stores of a model."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ParamSpec, TypeVar

import redis.asyncio as redis

from kvroute.contract.unreadable import Unreadable
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

OLDEST_REDIS = (6, 2)  # oldest version of Redis with all commands that kvroute's scripts use
SAFE_POLICY = "noeviction"  # the only maxmemory-policy with which Redis keeps the whole index
TIMEOUT_S = 5.0  # timeout of one call to Redis, in seconds
# What users are told about a cluster whose Redis is away.
WITHOUT_REDIS = "requests are answered meanwhile, with fewer cache hits"


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
    model: str
    _: KW_ONLY
    cluster: str = DEFAULT_CLUSTER
    unreadable: Unreadable = field(default_factory=Unreadable)  # counts unreadable data in Redis

    def __post_init__(self) -> None:
        # redis-py's types are unions of all protocol versions' replies.
        self._redis: Any = self.client
        self._prefix = key_prefix(self.cluster, self.model)
