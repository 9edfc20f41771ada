"""What several tests share, since starting it takes time."""

from collections.abc import Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from replica.model import BUILTIN_MODEL, resolve
from router.api.prompt import Prompts
from router.command.embedded_redis import embedded_redis
from tests.serving import Cluster, start_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever asks the cluster of all tests comes last: it would take its share of the cores from
    the others, and the fewest of them run after it has started."""
    shared = {
        item.path
        for item in items
        if isinstance(item, pytest.Function) and "simulated_cluster" in item.fixturenames
    }
    items.sort(key=lambda item: item.path in shared)


@pytest.fixture(scope="session")
def simulated_cluster() -> Iterator[Cluster]:
    """Four replicas without a model behind two routers."""
    with start_cluster(
        *("--engine", "simulated", "--replicas", "4", "--routers", "2"),
        *("--simulated-prefill-tokens-per-s", "50000", "--simulated-decode-ms", "2"),
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    """A Redis of the module's own."""
    with embedded_redis() as url:
        yield url


@pytest.fixture(scope="module")
def prompts() -> Iterator[Prompts]:
    """The built-in model's tokenizer."""
    prompts = Prompts(resolve(BUILTIN_MODEL))
    yield prompts
    prompts.close()


@pytest.fixture(scope="session")
def cluster(simulated_cluster: Cluster) -> Cluster:
    """Which cluster a module's tests talk to, unless the module starts one of its own."""
    return simulated_cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with openai_client(cluster) as client:
        yield client


def async_openai_client(url: str, *, max_retries: int = 0, timeout_s: float = 60) -> AsyncOpenAI:
    """url: where the cluster listens."""
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=timeout_s
    )


def openai_client(cluster: Cluster) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60)
