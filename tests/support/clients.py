"""The openai client, as tests use it: without a key, and without retries unless they are wanted."""

from openai import AsyncOpenAI, OpenAI

from tests.support.serving import Cluster


def async_openai_client(url: str, *, max_retries: int = 0, timeout_s: float = 60) -> AsyncOpenAI:
    """url: where the cluster listens."""
    return AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=max_retries, timeout=timeout_s
    )


def openai_client(cluster: Cluster, *, max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=max_retries, timeout=60)
