"""The openai client for tests, without an API key and, by default, without retries."""

import ssl

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, OpenAI

from tests.support.serving import Cluster


def async_openai_client(
    url: str,
    *,
    max_retries: int = 0,
    timeout_s: float = 60,
    trusting: ssl.SSLContext | None = None,
) -> AsyncOpenAI:
    """Return a client of the cluster at this URL.

    Args:
        url: The cluster's URL.
        max_retries: The number of retries.
        timeout_s: The timeout of a request in seconds.
        trusting: An SSL context with the certificates that the client accepts.
    """
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=max_retries,
        timeout=timeout_s,
        http_client=DefaultAsyncHttpxClient(verify=trusting) if trusting else None,
    )


def openai_client(cluster: Cluster, *, max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=max_retries, timeout=60)
