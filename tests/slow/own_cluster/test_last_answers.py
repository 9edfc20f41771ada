"""Answers that run when a cluster or a router stops finish, or end with an error."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import READY, Cluster, assert_gone, launched
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
SHORT_TOKENS, LONG_TOKENS = 200, 3000  # 2 s and 30 s, at 10 ms a token
SCALE_ROUTERS = """
    from kvroute.controller.ray_connection import connected
    from kvroute.process.ray_internals import set_replicas
    with connected({address!r}):
        set_replicas("kvroute", "Router", 1)
"""


@contextmanager
def serving(*options: str) -> Iterator[Cluster]:
    simulated = ("--engine", "simulated", "--replicas", "2", "--routers", "2")
    with launched(*simulated, *options) as cluster:
        cluster.wait_for(READY)
        yield cluster


def body(tokens: int, *, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello there"}]
    asked = {"model": BUILTIN_MODEL, "messages": messages, "max_tokens": tokens}
    return asked | {"ignore_eos": True, "stream": stream}


async def test_the_first_signal_lets_answers_finish_and_ends_the_rest_with_an_error() -> None:
    with serving("--drain-s", "8") as cluster:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=100) as client:
            asked = [(size, stream) for size in (SHORT_TOKENS, LONG_TOKENS) for stream in (1, 0)]
            answers = [
                asyncio.create_task(client.post(CHAT, json=body(size, stream=bool(stream))))
                for size, stream in asked
            ]
            await until(lambda: in_flight(cluster) == len(answers))
            os.killpg(cluster.process.pid, signal.SIGINT)  # as a terminal sends it
            await until(lambda: httpx.get(cluster.url + "/health").status_code == 503)
            await until(lambda: httpx.get(cluster.url + "/-/healthz").status_code == 503)
            refused = await client.post(CHAT, json=body(1, stream=False))
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["code"] == "stopping"
            stream, whole, cut_stream, cut_whole = await asyncio.gather(*answers)
        assert stream.text.endswith("data: [DONE]\n\n")
        assert "stopping" not in stream.text
        assert whole.json()["usage"]["completion_tokens"] == SHORT_TOKENS
        *_, error, done, _ = cut_stream.text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "stopping"
        assert done == "data: [DONE]"
        assert (cut_whole.status_code, cut_whole.json()["error"]["code"]) == (503, "stopping")
        assert cluster.process.wait(60) == 0
        assert "4 answers are still running, and may run up to 8 s" in cluster.output()
        assert_gone(cluster)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once(first: signal.Signals) -> None:
    with serving("--drain-s", "600") as cluster:
        asked = body(LONG_TOKENS, stream=True)
        with httpx.stream("POST", cluster.url + CHAT, json=asked, timeout=100) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            cluster.process.send_signal(first)
            cluster.wait_for("1 answer is still running", deadline_s=30)
            cluster.process.send_signal(first)
            with pytest.raises(httpx.RemoteProtocolError):
                b"".join(pieces)
        cluster.process.wait(30)
        assert_gone(cluster)


async def test_a_router_that_serve_takes_away_ends_its_last_answers_with_an_error() -> None:
    with serving("--drain-timeout-s", "6") as cluster:
        await until(lambda: len({router_of(cluster) for _ in range(4)}) == 2)
        async with httpx.AsyncClient(base_url=cluster.url, timeout=100) as client:
            sizes = [SHORT_TOKENS] * 4 + [LONG_TOKENS] * 4
            asked = [body(size, stream=True) for size in sizes]
            answers = [asyncio.create_task(client.post(CHAT, json=each)) for each in asked]
            await until(lambda: in_flight(cluster) == len(answers))
            take_a_router_away(cluster)
            ends = [(await answer).text[-300:] for answer in answers]
        assert all(end.endswith("data: [DONE]\n\n") for end in ends)
        is_cut = ['"code":"stopping"' in end for end in ends]
        assert not any(is_cut[:4]), "they had enough time"
        assert any(is_cut[4:])
        assert not all(is_cut[4:]), "the answers of the other router too"
        assert cluster.stop() == 0


def in_flight(cluster: Cluster) -> int:
    replicas = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["replicas"]
    return sum(replica["running"] for replica in replicas)


def router_of(cluster: Cluster) -> str:
    """Return the id of the router that answers next."""
    return str(httpx.get(cluster.url + "/v1/cluster/audit", timeout=60).json()["router"])


def take_a_router_away(cluster: Cluster) -> None:
    """Have Serve drain one of two routers, as in a rolling update."""
    address = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["ray_address"]
    script = textwrap.dedent(SCALE_ROUTERS.format(address=address))
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
