"""A cluster whose connections between routers and replicas use TLS with certificates of files."""

import asyncio
import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.certificates import Authority
from tests.support.scraping import attempts_that_failed
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet

STREAMS = 12
TOKENS = 3000  # of each answer: a busy machine must kill the replica before they end


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    tls = Authority(tmp_path_factory.mktemp("tls") / "authority").issue("node")
    files = ("--wire-tls-cert", tls.cert, "--wire-tls-key", tls.key, "--wire-tls-ca", tls.ca)
    options = ("--engine", "simulated", "--replicas", "3", "--routers", "2")
    with start_cluster(*options, "--simulated-decode-ms", "2", "--wire-tls", *files) as cluster:
        yield cluster


async def recited(client: httpx.AsyncClient, number: int, replicas: list[str]) -> str:
    """Return the text of an answer; add its replica as soon as it has begun."""
    body = {
        "model": BUILTIN_MODEL,
        "prompt": f"{number} " * 20,
        "max_tokens": TOKENS,
        "temperature": 0,
        "stream": True,
    }
    text = ""
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            replicas.append(response.headers["x-kvroute-replica"])
            if line.startswith("data: {"):
                text += httpx.Response(200, text=line[6:]).json()["choices"][0]["text"]
    return text


def pids(cluster: Cluster) -> dict[str, int]:
    """Return the process id of each replica in the index, by replica id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in listed}


async def test_a_killed_replica_costs_no_answer(encrypted: Cluster) -> None:
    wait_for_fleet(encrypted)
    async with httpx.AsyncClient(base_url=encrypted.url, timeout=120) as client:
        undisturbed = await asyncio.gather(*(recited(client, n, []) for n in range(STREAMS)))
        failed, before = attempts_that_failed(encrypted), pids(encrypted)
        replicas: list[str] = []
        reciting = asyncio.gather(*(recited(client, n, replicas) for n in range(STREAMS)))
        await until(lambda: replicas)
        os.kill(before[replicas[0]], signal.SIGKILL)
        assert await reciting == undisturbed
        assert attempts_that_failed(encrypted) > failed, "the answers had ended before the kill"
    wait_for_fleet(encrypted)


async def test_a_client_without_a_certificate_gets_no_byte(encrypted: Cluster) -> None:
    replica = psutil.Process(next(iter(pids(encrypted).values())))
    peers = {
        connection.laddr.port
        for connection in replica.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.ip == "127.0.0.1"
    }
    greetings = [await greeting(port) for port in peers]
    assert not any(len(said) >= 16 for said in greetings)  # a challenge has a nonce of 16 bytes


async def greeting(port: int) -> bytes:
    """Return what a server says to a client that says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(1):
            return await reader.read(100)
    except TimeoutError:
        return b""
    finally:
        writer.close()
