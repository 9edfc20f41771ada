"""Fixtures and hooks that the tests of several folders share."""

import asyncio
import gc
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.exceptions
from hypothesis import HealthCheck, settings
from openai import OpenAI
from redis.asyncio import Redis

from kvroute.local.embedded_redis import embedded_redis
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.connection import connect
from tests.support import certificate_bundle
from tests.support.clients import openai_client
from tests.support.collector import Collector, collecting
from tests.support.engines import TOOL_PARSER, terse_model
from tests.support.order import Scopes, put_in_order
from tests.support.serving import COMMAND, Cluster
from tests.support.shared import pytest_runtest_teardown, shared_cluster
from tests.support.untested import pytest_terminal_summary
from tests.support.workloads import TASKS

# Tests do not judge how fast the machine is, or how fast it makes examples. `make test` has ten
# minutes, so it tries fewer examples than the parts of `make test-all`, which set the variable.
settings.register_profile(
    "any speed",
    max_examples=int(os.environ.get("KVROUTE_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("any speed")
certificate_bundle.share()

__all__ = ["pytest_runtest_teardown", "pytest_terminal_summary"]  # hooks of pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    put_in_order(items)


def pytest_collection_finish() -> None:
    """Exempt tests and libraries from garbage collection: it would take an eighth of the time."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scopes:
    return Scopes(config, log)


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    """Return a client of the module's cluster."""
    with openai_client(cluster) as client:
        yield client


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """Start a Redis for one module."""
    with embedded_redis() as url:
        yield url


@pytest.fixture
async def empty_redis(redis_url: str) -> AsyncIterator[Redis]:
    """Empty the module's Redis and return a connection to it.

    A busy machine can take longer than the client's timeout for the first connection.
    """
    client = connect(redis_url)
    async with asyncio.timeout(60):
        while not await _is_emptied(client):
            await asyncio.sleep(0.1)
    yield client
    await client.aclose()


async def _is_emptied(client: Redis) -> bool:
    try:
        await client.flushall()
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return False
    return True


@pytest.fixture(scope="session")
def prompts() -> Iterator[Prompts]:
    """Return the built-in model's tokenizer and chat template."""
    prompts = Prompts(resolve(BUILTIN_MODEL))
    yield prompts
    prompts.close()


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Receive the spans of `simulated_cluster`."""
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="session")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the request log of `simulated_cluster`."""
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="session")
def simulated_cluster(collector: Collector, request_log: Path) -> Iterator[Cluster]:
    """Four replicas behind two routers, with traces, JSON logs and a request log."""
    yield from shared_cluster(
        "simulated_cluster",
        *("--engine", "simulated", "--replicas", "4", "--routers", "2"),
        *("--simulated-prefill-tokens-per-s", "50000", "--simulated-decode-ms", "2"),
        *("--log-format", "json", "--request-log", str(request_log)),
        env=collector.env,
    )


@pytest.fixture(scope="session")
def vllm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two vLLM replicas of a model with two layers, behind two routers, with a file of prefixes.

    Tests compare answers: in float32 a cached and a computed prompt have the same one. The engines
    take all cores that they get, so the tests beside them come first.
    """
    model = str(terse_model(tmp_path_factory.mktemp("vllm") / "model"))
    yield from shared_cluster(
        "vllm_cluster",
        *("--model", model, "--served-model-name", BUILTIN_MODEL, "--routers", "2"),
        *("--dtype", "float32", "--kv-cache-memory-mb", "256", "--max-model-len", "4096"),
        *("--max-compile-s", "2", "--response-store-mb", "16"),
        *("--engine-arg", f"tool_call_parser={TOOL_PARSER}"),
        env={"MULTI_TASK_PROMPT_STR": json.dumps(TASKS)},
        command=("nice", "-n", "10", *COMMAND),
        stop_s=180.0,  # with its low priority, it takes long beside other tests
    )
