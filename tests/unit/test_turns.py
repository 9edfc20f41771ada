"""Requests that arrive together start one by one; a crowd leaves the event loop more time."""

import asyncio
from itertools import pairwise

import pytest

from kvroute.router.api import turns
from kvroute.router.api.turns import CROWD_ROUNDS, Turns


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
async def test_rounds_between_two(
    is_crowd: bool, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "CROWD_S", 60.0)
    rounds, turns_, starts = Rounds(), Turns(), list[int]()

    async def start() -> None:
        await turns_.next(is_crowd=is_crowd)
        starts.append(rounds.count)

    await asyncio.gather(*(start() for _ in range(10)))
    between = [after - before for before, after in pairwise(starts)]
    assert all(least <= count < least + 4 for count in between), between


async def test_a_crowd_does_not_wait_long_in_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CROWD_S", -1.0)
    rounds = Rounds()
    await Turns().next(is_crowd=True)
    assert rounds.count < CROWD_ROUNDS
