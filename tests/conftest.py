"""What the tests of several rooms share."""

import gc
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from openai import OpenAI
from redis.asyncio import Redis

from kvroute.local.embedded_redis import embedded_redis
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.connection import connect
from tests.support.clients import openai_client
from tests.support.order import Rooms, put_in_order
from tests.support.serving import Cluster
from tests.support.untested import pytest_terminal_summary

# How fast the machine is, or makes examples, is not what tests judge.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

__all__ = ["pytest_terminal_summary"]  # a hook of pytest's


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)


def pytest_collection_finish() -> None:
    """The collector would look at tests and libraries again and again, an eighth of all time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Rooms:
    return Rooms(config, log)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    """A client of the module's cluster."""
    with openai_client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis of the module's own."""
    with embedded_redis() as url:
        yield url


@pytest.fixture
async def empty_redis(redis_url: str) -> AsyncIterator[Redis]:
    """A connection to it, with nothing in it."""
    client = connect(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def prompts() -> Iterator[Prompts]:
    """The built-in model's tokenizer."""
    prompts = Prompts(resolve(BUILTIN_MODEL))
    yield prompts
    prompts.close()
