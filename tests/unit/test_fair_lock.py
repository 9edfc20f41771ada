"""Requests that arrive together start one by one; a crowd gives other tasks more time."""

import asyncio
from itertools import pairwise

import pytest

from kvroute.router.api import fair_lock
from kvroute.router.api.fair_lock import CROWD_ROUNDS, FairLock


class Rounds:
    """Counts rounds of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._loop.call_soon(self._next)


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
