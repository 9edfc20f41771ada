"""The cost of each route and kind of body in a router and a vLLM replica, and in `vllm serve`.

A cluster with one replica and vLLM's own server both have a shallow model, and get requests
alternately. Clients and engines are separate processes on the same cores.
"""

import asyncio
import json
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from tests.bench.report import Row, Section
from tests.bench.stock_server import stock_server
from tests.bench.stream.cluster import Serving
from tests.bench.stream.load import Processes, cpu_since, cpu_so_far, idle_cpu_s
from tests.bench.stream.mock_engine import HOST
from tests.support.bodies import ASK, CHATS, COMPLETIONS, MESSAGES, RESPONSES, TOOL
from tests.support.engines import TOOL_PARSER, shallow_model
from tests.support.serving import start_cluster

AT_ONCE = 8
ROUNDS = 3  # number of rounds for each server; the result is the median
CACHE_MB = 64
MODEL = "m"
IDLE_S = 5.0
USAGE = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
STOCK = "vllm serve"

TOKENS = 200
WITH_USAGE = {"stream_options": {"include_usage": True}}
EXACTLY = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, **WITH_USAGE}
CHAT: dict[str, Any] = {"messages": ASK, "temperature": 0, **EXACTLY}
WHOLE = {key: value for key, value in CHAT.items() if key not in WITH_USAGE} | {"stream": False}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat, streamed": (CHATS, CHAT),
    "chat with tools, streamed": (CHATS, CHAT | {"tools": [TOOL]}),
    "chat with logprobs, streamed": (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2}),
    "chat, whole": (CHATS, WHOLE),
    "completion, streamed": (COMPLETIONS, {"prompt": "Once", **EXACTLY}),
    "response, streamed": (
        RESPONSES,
        {
            "input": ASK,
            "max_output_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        },
    ),
    "message, streamed": (
        MESSAGES,
        {"messages": ASK, "max_tokens": TOKENS, "temperature": 0, "stream": True},
    ),
    "chat of one token, whole": (CHATS, WHOLE | {"max_tokens": 1}),
}


@dataclass(frozen=True)
class Server:
    port: int
    processes: Processes
    idle_cpu_s: Mapping[str, float]  # role -> CPU seconds per second without requests


@dataclass
class Spent:
    """The costs of the answers of a round."""

    cpu_s: dict[str, float]  # role -> CPU seconds, without those of an idle process
    tokens: int
    events: int


def served() -> Section:
    with tempfile.TemporaryDirectory() as folder:
        model = str(shallow_model(Path(folder) / "model"))
        with cluster(model) as ours, stock(model) as theirs:
            rows = [asyncio.run(_row(ours, theirs, *kind)) for kind in KINDS.items()]
    idle = {**ours.idle_cpu_s, **theirs.idle_cpu_s}.items()
    took = ", ".join(f"{role} {1000 * cpu_s:.1f}" for role, cpu_s in idle)
    notes = [
        "The CPU time of the engines' processes is not included. The CPU time of idle processes is "
        f"subtracted; in ms per second, it is: {took}."
    ]
    return Section(f"Routes and kinds, {AT_ONCE} at a time: CPU us a token", rows, notes)


@contextmanager
def cluster(model: str) -> Iterator[Server]:
    """Run a cluster with one router and one replica."""
    with start_cluster(
        *("--model", model, "--served-model-name", MODEL, "--replicas", "1", "--no-ui"),
        *("--kv-cache-memory-mb", str(CACHE_MB)),
        *("--engine-arg", f"tool_call_parser={TOOL_PARSER}"),
    ) as started:
        started_cluster = Serving(started)
        yield _server(started_cluster.port, started_cluster.processes())


@contextmanager
def stock(model: str) -> Iterator[Server]:
    """Run vLLM's own server."""
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER)
    with stock_server(model, *tools, name=MODEL, cache_mb=CACHE_MB) as (port, pid):
        yield _server(port, {STOCK: [pid]})


def _server(port: int, processes: Processes) -> Server:
    return Server(port, processes, idle_cpu_s(processes, seconds=IDLE_S))


async def _row(ours: Server, theirs: Server, name: str, kind: tuple[str, dict[str, Any]]) -> Row:
    rounds: list[tuple[Spent, Spent]] = []
    for _ in range(1 + ROUNDS):
        rounds.append((await _round(ours, *kind), await _round(theirs, *kind)))
    mine, others = zip(*rounds[1:], strict=True)  # the first one warms up
    replica, server = _us(mine, "replica"), _us(others, STOCK)
    return {
        "kind": name,
        "tokens": median(spent.tokens for spent in mine) / AT_ONCE,
        "router": _us(mine, "router"),
        "replica": replica,
        "HAProxy": _us(mine, "HAProxy"),
        STOCK: server,
        f"replica / {STOCK}": replica / server,
        "events a token": _events(mine),
        f"... of {STOCK}": _events(others),
    }


def _us(rounds: Sequence[Spent], role: str) -> float:
    return median(1e6 * round_.cpu_s[role] / round_.tokens for round_ in rounds)


def _events(rounds: Sequence[Spent]) -> float:
    return median(round_.events / round_.tokens for round_ in rounds)


async def _round(server: Server, path: str, body: dict[str, Any]) -> Spent:
    raw = json.dumps({"model": MODEL, **body}).encode()
    before, begun_s = cpu_so_far(server.processes), time.perf_counter()
    async with httpx.AsyncClient(base_url=f"http://{HOST}:{server.port}", timeout=120) as http:
        counts = await asyncio.gather(*(_answer(http, path, raw) for _ in range(AT_ONCE)))
    spent, took_s = cpu_since(before, server.processes), time.perf_counter() - begun_s
    beyond = {role: cpu_s - took_s * server.idle_cpu_s[role] for role, cpu_s in spent.items()}
    tokens, events = map(sum, zip(*counts, strict=True))
    return Spent(beyond, tokens, events)


async def _answer(http: httpx.AsyncClient, path: str, raw: bytes) -> tuple[int, int]:
    """Send a request; return the number of tokens and of events of the answer."""
    headers = {"content-type": "application/json"}
    response = await http.post(path, content=raw, headers=headers)
    if response.status_code != 200:
        raise RuntimeError(f"{path}: {response.status_code} {response.text[:500]}")
    used = USAGE.findall(response.content)
    return int(used[-1]), max(1, response.content.count(b"\ndata: "))


if __name__ == "__main__":
    print(served().markdown())
