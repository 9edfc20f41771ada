"""Requests wait for a seat of their session, and do not delay other requests."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.seats.router_seats import RouterSeats
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import Urgency
from kvroute.router.queueing.waiting_room import WaitingRoom
from kvroute.router.queueing.wake import Wake
from kvroute.router.sessions.turns import SessionHints
from tests.support.waiting import until

BLOCK = 16
REPLICA = "0"


class Line:
    """The line of requests for one seat, with a clock of its own."""

    def __init__(self, max_wait_s: float = 600.0) -> None:
        self.now_s = 100.0
        self.feature = RouterSeats(most=1, max_wait_s=max_wait_s)
        self.seats = self.feature.seats
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=BLOCK,
            rng=random.Random(0),
            features=PlacingFeatures([self.feature]),
        )
        self.wake = Wake()
        self.seating = WaitingRoom(
            self.feature.line,
            self.fleet,
            busy_backlog_s=lambda: 1.0,
            wake=self.wake,
            clock=lambda: self.now_s,
        )
        self._chains: dict[int, list[Fingerprint]] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.seating.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def ask(self, session: int, *, blocks: int = 1, **more: Any) -> float:
        """Send the session's next turn. Return how long it has waited for a seat."""
        chain = self._chains.setdefault(session, [])
        chain.extend(Fingerprint(1000 * session + len(chain) + each) for each in range(blocks))
        tokens = BLOCK * len(chain) + 1
        placement = self.fleet.place_chain(chain, tokens, [REPLICA], self.now_s)
        said = more.pop("hints", SessionHints(session))
        context = self.fleet.recognise(placement, RequestContext(self.now_s, hints=said))
        context = replace(context, **more)
        waited_s = await self.seating.leave(placement, context)
        self.fleet.sent(placement, REPLICA, f"{session} {len(chain)}", self.now_s, context).end()
        return waited_s

    async def begin(self, *sessions: int) -> None:
        """Send the first turn of each session, and the second of the first one."""
        for session in sessions:
            assert await self.ask(session) == 0.0
        assert await self.ask(sessions[0]) == 0.0

    def end(self, session: int) -> None:
        self.fleet.end_session(session)
        self.wake.set()

    async def has_waiting(self, count: int) -> None:
        await until(lambda: len(self.seats) == count)


async def test_a_request_waits_until_its_session_has_a_seat() -> None:
    line = Line()
    async with line.running():
        await line.begin(1, 2)
        waiting = asyncio.create_task(line.ask(2))
        await line.has_waiting(1)
        line.now_s += 20
        line.end(1)
        assert await waiting == 20.0
        assert await line.ask(2) == 0.0


@pytest.mark.parametrize(
    "more",
    [{"urgency": Urgency("batch")}, {"prompts": 2}, {"turn": None}],
)
async def test_batch_requests_and_calls_with_several_prompts_need_no_seat(
    more: dict[str, Any],
) -> None:
    line = Line()
    await line.begin(1, 2)
    assert await line.ask(2, **more) == 0.0


async def test_batch_requests_make_no_active_sessions() -> None:
    line = Line()
    for session in range(1, 4):
        await line.ask(session, urgency=Urgency("batch"), is_in_lane=True)
    assert line.seats.state(line.now_s).sessions == 0
    await line.ask(1)
    assert line.seats.state(line.now_s).sessions == 1


async def test_a_prompt_without_a_full_block_needs_no_seat() -> None:
    line = Line()
    await line.begin(1)
    assert await line.ask(2, blocks=0) == 0.0
    assert await line.ask(2, blocks=0) == 0.0


async def test_the_last_turn_of_a_session_gives_its_seat_back() -> None:
    line = Line()
    async with line.running():
        await line.begin(1, 2)
        waiting = asyncio.create_task(line.ask(2))
        await line.has_waiting(1)
        await line.ask(1, hints=SessionHints(1, is_end=True))
        assert await waiting == 0.0


async def test_a_client_that_disconnects_leaves_its_place_to_the_next() -> None:
    line = Line()
    async with line.running():
        await line.begin(1, 2, 3)
        leaving, staying = (asyncio.create_task(line.ask(session)) for session in (2, 3))
        await line.has_waiting(2)
        leaving.cancel()
        await line.has_waiting(1)
        line.end(1)
        assert await staying == 0.0


@pytest.mark.parametrize(
    ("max_wait_s", "deadline_s", "whose"),
    [(0.01, math.inf, "--max-seat-wait-s is 0.01 s"), (600.0, 0.01, "its deadline is 0.01 s")],
)
async def test_a_request_that_waits_too_long_gets_a_time_for_the_retry(
    max_wait_s: float, deadline_s: float, whose: str
) -> None:
    line = Line(max_wait_s=max_wait_s)
    async with line.running():
        await line.begin(1, 2)
        waiting = asyncio.create_task(line.ask(2, urgency=Urgency(deadline_s=deadline_s)))
        await line.has_waiting(1)
        line.now_s += 1
        with pytest.raises(ApiError, match=whose) as refused:
            await waiting
    assert (refused.value.status, refused.value.code) == (429, "no_seat")
    assert refused.value.headers["retry-after"] == "1"
    assert len(line.seats) == 0


async def test_a_request_that_would_wait_too_long_is_refused_at_once_unless_it_is_first() -> None:
    line = Line(max_wait_s=100.0)
    async with line.running():
        await line.begin(1, 2, 3, 4)
        waiting = asyncio.create_task(line.ask(2))
        await line.has_waiting(1)
        line.now_s += 80
        line.end(1)
        assert await waiting == 80.0
        first = asyncio.create_task(line.ask(3))
        await line.has_waiting(1)
        with pytest.raises(ApiError, match=r"would wait 160 s .* is 100 s") as refused:
            await line.ask(4)
        assert refused.value.headers["retry-after"] == "60"
        first.cancel()


async def test_a_request_is_refused_if_too_many_wait_for_a_seat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.router.queueing.waiting_room.WAITING", 1)
    line = Line()
    async with line.running():
        await line.begin(1, 2, 3)
        waiting = asyncio.create_task(line.ask(2))
        await line.has_waiting(1)
        with pytest.raises(ApiError, match="one of more than 1 that wait"):
            await line.ask(3)
        waiting.cancel()
