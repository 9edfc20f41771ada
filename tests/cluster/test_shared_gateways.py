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
                replica = answered_by(first, "from the first process")
                wait_until_expected(second, "from the first process", on=replica)
                wait_until_expected(first, "from the first process", on=replica)
                # One process for each server: on a busy machine the second may have taken one over.
                both = {first.process.pid, second.process.pid}
                assert len(publishers(second)) == 2
                assert both.issuperset(publishers(second))
                first.process.kill()
                wait_until(lambda: publishers(second) == [second.process.pid] * 2)
                wait_until_expected(second, "from the first process", on=replica)
                wait_until_expected(second, "alone", on=answered_by(second, "alone"))


def publishers(gateway: Cluster) -> list[int]:
    """Return for each server the process that publishes what it has cached."""
    cluster = httpx.get(f"{gateway.url}/v1/cluster", timeout=60).json()
    return [replica["pid"] for replica in cluster["replicas"]]


def chat(text: str) -> dict[str, object]:
    """Return the body of a request with this text, a hundred times."""
    message = {"role": "user", "content": f"{text} " * 100}
    return {"model": ID["model"], "messages": [message], "max_tokens": 1, "stream": False}


def answered_by(gateway: Cluster, text: str) -> str:
    """Send a prompt; return the replica that has answered it, and so has it in its cache."""
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=chat(text), timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-kvroute-replica"]


def wait_until_expected(gateway: Cluster, text: str, *, on: str) -> None:
    """Wait until the gateway expects the prompt in this replica's cache alone; send it to none."""
    wait_until(lambda: expecting(gateway, text) == [on])


def expecting(gateway: Cluster, text: str) -> list[str]:
    """Return the replicas in whose caches most of a prompt is expected."""
    answer = httpx.post(f"{gateway.url}/v1/route", json=chat(text), timeout=60)
    assert answer.status_code == 200, answer.text
    [receipt] = answer.json()["receipts"]
    return [each["id"] for each in receipt["replicas"] if each["hit_tokens"] > 100]
