"""A router ends the replicas that hang, and no others."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvroute.router.connections.links import HungError
from kvroute.router.connections.liveness import Liveness
from kvroute.router.placement.fleet import Fleet
from tests.support.records import record
from tests.support.wired import FakeLinks

LOOKS = 20  # to a verdict


class Replica:
    """A fleet of one."""

    def __init__(self) -> None:
        self.hangs = False
        self.is_listed = True
        self.questions = 0
        self.kills = 0

    def ids(self) -> list[str]:
        return ["a"] if self.is_listed else []

    async def probe(self, _: str) -> None:
        self.questions += 1
        if self.hangs:
            await asyncio.Event().wait()

    async def kill(self, _: str) -> None:
        self.kills += 1


@pytest.fixture
def replica() -> Replica:
    return Replica()


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(model="m", revision="", block_size=4, rng=random.Random(0))


@pytest.fixture
def links(replica: Replica) -> FakeLinks:
    return FakeLinks(replica.ids)


@pytest.fixture
def liveness(replica: Any, links: Any, fleet: Fleet) -> Liveness:
    return Liveness(lambda: replica, links, fleet, hang_timeout_s=LOOKS / 4)


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()


async def check(liveness: Liveness, tasks: asyncio.TaskGroup, times: int) -> None:
    for _ in range(times):
        liveness.check(tasks)
        for _ in range(3):
            await asyncio.sleep(0)  # runs the tasks that the check started


async def test_a_busy_replica_that_answers_probes_is_not_killed(
    liveness: Liveness, replica: Replica, tasks: asyncio.TaskGroup
) -> None:
    await check(liveness, tasks, 5 * LOOKS)
    assert replica.questions > 5
    assert replica.kills == 0
    assert liveness.trusted() == ["a"]


async def test_a_replica_that_does_not_answer_probes_is_killed(
    liveness: Liveness, replica: Replica, tasks: asyncio.TaskGroup
) -> None:
    replica.hangs = True
    await check(liveness, tasks, LOOKS - 1)
    assert (replica.questions, replica.kills) == (1, 0)
    assert liveness.trusted() == []
    await check(liveness, tasks, 1)
    assert replica.kills == 1


async def test_requests_on_a_replica_that_is_declared_dead_end_at_once(
    liveness: Liveness, replica: Replica, links: FakeLinks, tasks: asyncio.TaskGroup
) -> None:
    replica.hangs = True
    await check(liveness, tasks, LOOKS - 1)
    assert not links.lost
    await check(liveness, tasks, 1)
    ((lost, error),) = links.lost
    assert lost == "a"
    assert isinstance(error, HungError)


async def test_a_replica_that_serve_has_removed_is_checked_while_it_runs_requests(
    liveness: Liveness, replica: Replica, links: FakeLinks, tasks: asyncio.TaskGroup
) -> None:
    replica.is_listed, links.waiting = False, {"a"}
    await check(liveness, tasks, 2 * LOOKS)
    assert not links.lost
    replica.hangs = True
    await check(liveness, tasks, 2 * LOOKS)
    assert links.lost


async def test_a_replica_that_sends_messages_is_not_probed(
    liveness: Liveness, replica: Replica, links: FakeLinks, tasks: asyncio.TaskGroup
) -> None:
    for _ in range(2 * LOOKS):
        links.messages += 1
        await check(liveness, tasks, 1)
    assert replica.questions == 0


async def test_an_idle_replica_with_a_lease_is_not_probed(
    liveness: Liveness, replica: Replica, fleet: Fleet, tasks: asyncio.TaskGroup
) -> None:
    fleet.update([record("a")])
    replica.hangs = True
    await check(liveness, tasks, 2 * LOOKS)
    assert replica.questions == 0
    fleet.update([])  # its lease has run out
    await check(liveness, tasks, LOOKS)
    assert replica.kills == 1


async def test_a_replica_that_was_declared_dead_is_not_trusted_although_it_is_idle(
    liveness: Liveness, replica: Replica, fleet: Fleet, tasks: asyncio.TaskGroup
) -> None:
    replica.hangs = True
    await check(liveness, tasks, LOOKS)
    fleet.update([record("a")])
    await check(liveness, tasks, 1)
    assert liveness.trusted() == []
