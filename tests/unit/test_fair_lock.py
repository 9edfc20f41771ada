"""Requests that arrive together start one by one; a crowd gives other tasks more time."""

import asyncio
from itertools import pairwise

import pytest

from kvroute.router.api import fair_lock
from kvroute.router.api.fair_lock import CROWD_ROUNDS, FairLock, run_all
from tests.support.rounds import Rounds, most_in_a_round


@pytest.mark.parametrize(("is_crowd", "least"), [(False, 1), (True, CROWD_ROUNDS)])
async def test_other_tasks_run_between_two_requests(
    is_crowd: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_lock, "CROWD_S", 60.0)
    rounds, lock, starts = Rounds(), FairLock(), list[int]()

    async def start() -> None:
        await lock.wait(is_crowd=is_crowd)
        starts.append(rounds.count)

    await asyncio.gather(*(start() for _ in range(10)))
    between = [after - before for before, after in pairwise(starts)]
    assert all(least <= count < least + 4 for count in between), between


async def test_a_crowd_does_not_wait_long_in_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_lock, "CROWD_S", -1.0)
    rounds = Rounds()
    await FairLock().wait(is_crowd=True)
    assert rounds.count < CROWD_ROUNDS


class Work:
    """Coroutines that run until they are cancelled, with the rounds of their starts and ends."""

    def __init__(self, failing: int | None = None) -> None:
        self.rounds, self.started, self.ended = Rounds(), list[int](), list[int]()
        self._failing = failing

    async def run(self, number: int) -> None:
        self.started.append(self.rounds.count)
        try:
            while number != self._failing or len(self.started) < TASKS:
                await asyncio.sleep(0)
            raise ValueError(number)
        except asyncio.CancelledError:
            self.ended.append(self.rounds.count)
            raise


TASKS = 20


async def test_coroutines_start_and_are_cancelled_one_by_one() -> None:
    work = Work(failing=7)
    with pytest.raises(ValueError, match="7"):
        await run_all(work.run(number) for number in range(TASKS))
    assert (len(work.started), len(work.ended)) == (TASKS, TASKS - 1)
    assert most_in_a_round(work.started) <= 2
    assert most_in_a_round(work.ended) <= 2


async def test_no_coroutines_have_no_results() -> None:
    assert await run_all([]) == []


async def test_coroutines_are_cancelled_one_by_one_when_their_caller_is() -> None:
    work = Work()
    running = asyncio.create_task(run_all(work.run(number) for number in range(TASKS)))
    while len(work.started) < TASKS:
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(work.ended) == TASKS
    assert most_in_a_round(work.ended) <= 2
