"""A client for Redis, and a bound on each call to it."""

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

import redis.asyncio as redis

OLDEST_REDIS = (6, 2)  # the scripts need commands of this version
ANSWER_S = 5.0  # the timeout of one call to Redis


def connect(url: str) -> "redis.Redis":
    """A client for `Index`; connects at its first use. Raises ValueError for an invalid URL."""
    return redis.from_url(
        url,
        protocol=2,  # the same reply types from every server version
        socket_connect_timeout=ANSWER_S,
        # `answered` below bounds every call. With a timeout here, redis-py writes under
        # asyncio.wait_for. Before Python 3.12 that loses a cancellation at the end of the write.
        socket_timeout=None,
    )


P = ParamSpec("P")
T = TypeVar("T")


def answered(call: Callable[P, Awaitable[T]]) -> Callable[P, Awaitable[T]]:
    """Limits a call to ANSWER_S; raises TimeoutError, which is an OSError like other failures."""

    @functools.wraps(call)
    async def bounded(*args: P.args, **kwargs: P.kwargs) -> T:
        async with asyncio.timeout(ANSWER_S):
            return await call(*args, **kwargs)

    return bounded
