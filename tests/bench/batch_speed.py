"""How fast a batch runs alone on a cluster of simulated replicas, compared with 64 plain clients.

The same lines are sent in three ways, one after the other and in a changing order: with the class
default by 64 clients, as `kvroute batch run --priority batch` does, and through the Batch API. Only
the ratios count, since replicas, routers and clients share the cores of one machine.

python -m tests.bench.batch_speed --replicas 2 --lines 2000 --seeds 3
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Annotated

import httpx
import msgspec
import typer

from kvroute.batch.lines import CustomId, SentLine
from kvroute.batch.run import Runner
from kvroute.batch.window import Window
from kvroute.command.batch_command import MAX_OPEN
from tests.bench.report import Row, Section
from tests.support.batches import create, is_final
from tests.support.clients import openai_client
from tests.support.serving import Cluster, start_cluster

CLIENTS = 64
URL = "/v1/chat/completions"
LINES_OF_A_TEXT = 5
PAUSE_S = 0.3  # mean pause of the client of chats beside a batch


class Fixed(Window):
    """A window that does not change."""

    @property
    def size(self) -> int:
        return CLIENTS


class Nowhere:
    """Takes the place of a file for answers, which must all be good."""

    def write(self, custom_id: CustomId, *, status: int, request_id: str, body: bytes) -> None:
        assert status == httpx.codes.OK, body

    async def sync(self) -> None:
        pass


def bodies(model: str, count: int, run: str) -> list[bytes]:
    """Return the bodies of a batch, whose texts no other run has."""
    found = []
    for number in range(count):
        words = random.Random(f"{run}/{number // LINES_OF_A_TEXT}").choices(range(1000), k=60)
        content = f"{run} {' '.join(map(str, words))} {number}"
        messages = [{"role": "user", "content": content}]
        found.append(json.dumps({"model": model, "messages": messages, "max_tokens": 4}).encode())
    return found


async def sent(url: str, lines: list[bytes], priority: str, window: Window) -> float:
    """Send lines as `kvroute batch run` does, and return the lines per second."""
    headers = {"content-type": "application/json", "x-kvroute-priority": priority}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=None, trust_env=False
    ) as client:
        runner = Runner(
            client,
            lambda index: SentLine(str(index), URL, msgspec.Raw(lines[index])),
            range(len(lines)),
            Nowhere(),
            total=len(lines),
            window=window,
        )
        start_s = time.monotonic()
        await runner.run(lambda progress: None)
        return len(lines) / (time.monotonic() - start_s)


def through_api(cluster: Cluster, lines: list[bytes]) -> float:
    """Run lines through the Batch API, and return the lines per second."""
    texts = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": URL, "body": None}).replace(
            '"body": null', '"body": ' + line.decode()
        )
        for number, line in enumerate(lines)
    ]
    with openai_client(cluster) as client:
        batch = create(client, texts)
        start_s = time.monotonic()
        while not is_final(client, batch.id):
            time.sleep(0.2)
        return len(lines) / (time.monotonic() - start_s)


async def beside(
    url: str, model: str, lines: list[bytes], priority: str, window: Window
) -> tuple[float, list[float]]:
    """Send lines beside a client of chats; return the lines per second, and the chats' seconds."""
    took_s: list[float] = []

    async def chat() -> None:
        rng = random.Random(0)
        async with httpx.AsyncClient(base_url=url, timeout=None, trust_env=False) as client:
            while True:
                await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
                (body,) = bodies(model, 1, f"chat {rng.random()}")
                start_s = time.monotonic()
                (await client.post(URL, content=body)).raise_for_status()
                took_s.append(time.monotonic() - start_s)

    chatting = asyncio.create_task(chat())
    try:
        return await sent(url, lines, priority, window), took_s
    finally:
        chatting.cancel()
        await asyncio.gather(chatting, return_exceptions=True)


def batch_speed(replicas: int, lines: int, seeds: int) -> Section:
    """Return the lines per second of each way to run a batch, and the times of chats beside it."""
    rows: list[Row] = []
    with start_cluster("--engine", "simulated", "--replicas", str(replicas)) as cluster:
        url = cluster.url
        model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
        asyncio.run(sent(url, bodies(model, 200, "first"), "default", clients()))
        for seed in range(seeds):
            order = random.Random(seed).sample(sorted(WAYS), len(WAYS))
            found = dict[str, float]()
            for name in order:
                found[name] = WAYS[name](cluster, bodies(model, lines, f"{seed} {name}"))
                print(f"{seed} {name}: {found[name]:.1f} lines/s", file=sys.stderr, flush=True)
            for name in WAYS:
                made = bodies(model, lines // 4, f"{seed} {name} beside")
                chats_s = [0.0]
                if name in BESIDE:
                    _, chats_s = asyncio.run(beside(url, model, made, *BESIDE[name]()))
                rows.append(
                    {
                        "seed": seed,
                        "way": name,
                        "lines/s": found[name],
                        "relative to 64 clients": found[name] / found["64 clients"],
                        "chats beside: p50 s": sorted(chats_s)[len(chats_s) // 2],
                        "p99 s": sorted(chats_s)[int(0.99 * len(chats_s))],
                    }
                )
                print(rows[-1], file=sys.stderr, flush=True)
    return Section(f"{lines} lines on {replicas} simulated replicas", rows)


def clients() -> Window:
    return Fixed(lambda: CLIENTS)


def found_window() -> Window:
    return Window(lambda: MAX_OPEN)


BESIDE: Mapping[str, Callable[[], tuple[str, Window]]] = {
    "64 clients": lambda: ("default", clients()),
    "class default": lambda: ("default", found_window()),
    "class batch": lambda: ("batch", found_window()),
}


def as_a_command(name: str) -> Callable[[Cluster, list[bytes]], float]:
    return lambda cluster, lines: asyncio.run(sent(cluster.url, lines, *BESIDE[name]()))


WAYS = {name: as_a_command(name) for name in BESIDE} | {"Batch API": through_api}


def main(
    replicas: Annotated[int, typer.Option()] = 2,
    lines: Annotated[int, typer.Option()] = 2000,
    seeds: Annotated[int, typer.Option()] = 3,
) -> None:
    """Print the table."""
    typer.echo(batch_speed(replicas, lines, seeds).markdown())


if __name__ == "__main__":
    typer.run(main)
