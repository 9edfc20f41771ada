"""A fleet grows and shrinks while twenty clients listen, and none of them notices."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from replica.model import BUILTIN_MODEL
from router.command.scale import Deployed, ScaleError, describe, refuse_no_room
from tests.conftest import async_openai_client
from tests.serving import KVROUTE, Cluster, start_cluster
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

CLIENTS = 20
STAGGER_S = 0.3  # between two clients' first answers: they do not end all at once
SERVE = ("--engine", "simulated", "--routers", "2", "--simulated-decode-ms", "30")


class Crowd:
    """Clients that stream, each the same answer again and again."""

    def __init__(self, client: AsyncOpenAI, **request: Any) -> None:
        self.began: set[str] = set()  # replicas that began an answer
        self.open: dict[int, str] = {}  # answers that are not over, by client: who began them
        self.answers: list[list[str]] = [[] for _ in range(CLIENTS)]
        self._client = client
        self._request = request

    async def listen(self, number: int) -> None:
        stream = await self._client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": f"What do you tell client {number}?"}],
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
    async def listening(self) -> AsyncIterator[None]:
        """Inside, everybody listens all the time; at its end, to the end of the last answer."""
        has_enough = asyncio.Event()

        async def keep_listening(number: int) -> None:
            await asyncio.sleep(number * STAGGER_S)
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


async def test_nothing_is_lost_when_the_fleet_grows_and_shrinks() -> None:
    """An answer with a presence penalty cannot go on elsewhere: its replica must finish it."""
    with start_cluster(*SERVE, "--replicas", "2") as cluster:
        async with async_openai_client(cluster.url) as client:
            crowd = Crowd(client, presence_penalty=0.5, max_tokens=60)
            await crowd.listen_once()
            async with crowd.listening():
                before = pids(cluster).keys()
                await scale(cluster, 3)
                (newcomer,) = pids(cluster).keys() - before
                await until(lambda: newcomer in crowd.began, within_s=30)
                fleet = pids(cluster)
                shrinking = asyncio.create_task(scale(cluster, 1))
                await until(lambda: len(pids(cluster)) == 1, within_s=60)
                drained = [fleet[id_] for id_ in fleet.keys() - pids(cluster).keys()]
                assert all(map(psutil.pid_exists, drained)), "they still have streams"
                await shrinking
                assert not any(map(psutil.pid_exists, drained))
                assert len(pids(cluster)) == 1, "they must not come back to the index"
    for answers in crowd.answers:
        assert all(answer == answers[0] for answer in answers)


async def test_what_a_drained_replica_cannot_finish_in_time_goes_on_elsewhere() -> None:
    with start_cluster(*SERVE, "--replicas", "2", "--drain-timeout-s", "2") as cluster:
        async with async_openai_client(cluster.url) as client:
            crowd = Crowd(client, max_tokens=200)  # six seconds
            await crowd.listen_once()
            async with crowd.listening():
                fleet = pids(cluster)
                shrinking = asyncio.create_task(scale(cluster, 1))
                await until(lambda: len(pids(cluster)) == 1, within_s=60)
                (drained,) = fleet.keys() - pids(cluster).keys()
                await until(lambda: not psutil.pid_exists(fleet[drained]), within_s=60)
                assert drained in crowd.open.values(), "it had finished them all"
                await shrinking
    for answers in crowd.answers:
        assert all(answer == answers[0] for answer in answers)


def test_more_replicas_than_there_is_room_for_are_refused_with_what_can_be_had() -> None:
    deployed = Deployed(2, {"RUNNING": 2, "STOPPING": 1}, "", {"CPU": 1, "GPU": 2})
    free = {"CPU": 90.0, "GPU": 3.0}
    refuse_no_room(4, deployed, free)
    with pytest.raises(ScaleError, match=r"5 replicas of 2 GPU .* 3 are there, .* 4 is the most"):
        refuse_no_room(5, deployed, free)


def test_it_says_what_it_waits_for() -> None:
    deployed = Deployed(1, {"RUNNING": 1, "STOPPING": 2}, "", {})
    assert "1 of 1 replicas ready, 2 taken away: finishing what they run" in describe(deployed)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [(("0",), "REPLICAS is 0"), (("2", "--url", "http://127.0.0.1:1"), "where no kvroute answers")],
)
def test_what_cannot_be_scaled_is_said(arguments: tuple[str, ...], complaint: str) -> None:
    command = [*KVROUTE, "scale", *arguments]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (refused.returncode, complaint in refused.stderr) == (1, True)
