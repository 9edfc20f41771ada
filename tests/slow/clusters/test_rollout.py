"""A fleet grows and shrinks while twenty clients listen, and none of them notices."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.serving import KVROUTE, Cluster
from tests.support.waiting import until

CLIENTS = 20
STAGGER_S = 0.3  # between two clients' first answers: they do not end all at once
LONG_STAGGER_S = 1.2  # the same, where an answer takes 24 s: many have just begun, at any time


class Crowd:
    """Clients that stream, each the same answer again and again. No crowd finds the cache of
    another: where it is heard is a matter of load."""

    def __init__(self, client: AsyncOpenAI, **request: Any) -> None:
        self.began: set[str] = set()  # replicas that began an answer
        self.open: dict[int, str] = {}  # answers that are not over, by client: who began them
        self.answers: list[list[str]] = [[] for _ in range(CLIENTS)]
        self._client = client
        self._topic = uuid.uuid4()
        self._request = request

    async def listen(self, number: int) -> None:
        stream = await self._client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": f"{self._topic}, client {number}?"}],
            temperature=0,
            stream=True,
            **self._request,
        )
        self.open[number] = stream.response.headers["x-kvroute-replica"]
        self.began.add(self.open[number])
        pieces = [event.choices[0].delta.content or "" async for event in stream]
        del self.open[number]
        self.answers[number].append("".join(pieces))

    async def listen_once(self) -> None:
        await asyncio.gather(*map(self.listen, range(CLIENTS)))

    @asynccontextmanager
    async def listening(self, stagger_s: float = STAGGER_S) -> AsyncIterator[None]:
        """Inside, everybody listens all the time; at its end, to the end of the last answer."""
        has_enough = asyncio.Event()

        async def keep_listening(number: int) -> None:
            await asyncio.sleep(number * stagger_s)
            while not has_enough.is_set():
                await self.listen(number)

        async with asyncio.TaskGroup() as tasks:
            for number in range(CLIENTS):
                tasks.create_task(keep_listening(number))
            yield
            has_enough.set()


def index(cluster: Cluster) -> list[dict[str, Any]]:
    """The replicas in it."""
    listed: list[dict[str, Any]]
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    return listed


def pids(cluster: Cluster) -> dict[str, int]:
    """By id."""
    return {replica["id"]: replica["pid"] for replica in index(cluster)}


async def scale(cluster: Cluster, replicas: int) -> None:
    """Fails with what the command printed when it fails."""
    command = [*KVROUTE, "scale", str(replicas), "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()


async def test_nothing_is_lost_when_the_fleet_grows_and_shrinks(trio: Cluster) -> None:
    """An answer with a presence penalty cannot go on elsewhere: its replica must finish it."""
    await scale(trio, 2)
    async with async_openai_client(trio.url) as client:
        crowd = Crowd(client, presence_penalty=0.5, max_tokens=60)
        await crowd.listen_once()
        async with crowd.listening():
            before = pids(trio).keys()
            await scale(trio, 3)
            (new_replica,) = pids(trio).keys() - before
            await until(lambda: new_replica in crowd.began)
            everybody = pids(trio)
            shrinking = asyncio.create_task(scale(trio, 1))
            await until(lambda: len(pids(trio)) == 1)
            drained = {id_: everybody[id_] for id_ in everybody.keys() - pids(trio).keys()}
            streaming = [drained[id_] for id_ in drained.keys() & {*crowd.open.values()}]
            assert all(map(psutil.pid_exists, streaming))
            await shrinking
            await until(lambda: not any(map(psutil.pid_exists, drained.values())))
            assert len(pids(trio)) == 1, "they must not come back to the index"
    for answers in crowd.answers:
        assert all(answer == answers[0] for answer in answers)


async def test_what_a_drained_replica_cannot_finish_in_time_goes_on_elsewhere(
    trio: Cluster,
) -> None:
    await scale(trio, 2)
    async with async_openai_client(trio.url) as client:
        crowd = Crowd(client, max_tokens=800)  # 24 seconds; a drain may take 8
        everybody = pids(trio)
        async with crowd.listening(LONG_STAGGER_S):
            await until(lambda: {*crowd.open.values()} == everybody.keys())
            shrinking = asyncio.create_task(scale(trio, 1))
            await until(lambda: len(pids(trio)) == 1)
            (drained,) = everybody.keys() - pids(trio).keys()
            await until(lambda: not psutil.pid_exists(everybody[drained]))
            assert drained in crowd.open.values(), "it had finished them all"
            await shrinking
        await crowd.listen_once()  # undisturbed
    for answers in crowd.answers:
        assert all(answer == answers[0] for answer in answers)
