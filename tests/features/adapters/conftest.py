"""Fixtures of the tests of added adapters."""

import pytest
from redis.asyncio import Redis


@pytest.fixture
def redis(empty_redis: Redis) -> Redis:
    """Return a client of an empty Redis."""
    return empty_redis
