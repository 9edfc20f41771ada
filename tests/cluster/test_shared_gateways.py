"""Several processes of `kvroute attach` with one Redis share the servers and their caches."""

import httpx

from tests.bench.stream.gateway import mock_engines
from tests.bench.stream.mock_engine import HOST, ID
from tests.support.serving import ATTACH, READY, Cluster, launched, start_cluster
from tests.support.waiting import wait_until


def test_each_knows_what_the_others_requests_have_cached_and_goes_on_alone(redis_url: str) -> None:
    with mock_engines(2, step_s=0.01, has_caches=True) as servers:
        urls = (f"http://{HOST}:{port}" for port in servers)
        options = (*urls, "--redis-url", redis_url, "--cluster", "one")
        with launched(*options, command=ATTACH) as first:
            first.wait_for(READY)
            wait_until(lambda: publishers(first) == [first.process.pid] * 2)
            with start_cluster(*options, command=ATTACH) as second:
                wait_until(lambda: len(publishers(second)) == 2)
                replica, _ = asked(first, "from the first process")
                expected = wait_until_expected(second, "from the first process")
                assert expected == wait_until_expected(first, "from the first process")
                assert expected[0] == replica
                assert publishers(second) == [first.process.pid] * 2
                first.process.kill()
                wait_until(lambda: publishers(second) == [second.process.pid] * 2)
                assert wait_until_expected(second, "from the first process") == expected
                asked(second, "alone")
                wait_until_expected(second, "alone")


def publishers(gateway: Cluster) -> list[int]:
    """Return for each server the process that publishes what it has cached."""
    cluster = httpx.get(f"{gateway.url}/v1/cluster", timeout=60).json()
    return [replica["pid"] for replica in cluster["replicas"]]


def asked(gateway: Cluster, text: str) -> tuple[str, int]:
    """Send a prompt; return the replica that got it, and the tokens expected in its cache."""
    message = {"role": "user", "content": f"{text} " * 100}
    body = {"model": ID["model"], "messages": [message], "max_tokens": 1, "stream": False}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    headers = answer.headers
    return headers["x-kvroute-replica"], int(headers["x-kvroute-expected-tokens"])


def wait_until_expected(gateway: Cluster, text: str) -> tuple[str, int]:
    """Wait until the whole prompt is expected in a cache; return what `asked` returns then."""
    wait_until(lambda: asked(gateway, text)[1] > 100)
    return asked(gateway, text)
