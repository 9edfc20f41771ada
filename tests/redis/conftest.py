"""Fixtures that tests of what is stored in Redis share."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from kvroute.store.connection import connect


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Yield a client of an empty Redis, and empty it again."""
    client = connect(redis_url)
    yield client
    await client.flushall()
    await client.aclose()
