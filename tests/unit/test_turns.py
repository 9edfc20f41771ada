"""What comes together begins one by one, and a crowd leaves the event loop time between two."""

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
    rounds, each, begun = Rounds(), Turns(), list[int]()

    async def begin() -> None:
        await each.next(is_crowd=is_crowd)
        begun.append(rounds.count)

    await asyncio.gather(*(begin() for _ in range(10)))
    between = [after - before for before, after in pairwise(begun)]
    assert all(least <= count < least + 4 for count in between), between


async def test_a_crowd_does_not_wait_long_in_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "CROWD_S", -1.0)
    rounds, each = Rounds(), Turns()
    await each.next(is_crowd=True)
    assert rounds.count < CROWD_ROUNDS
