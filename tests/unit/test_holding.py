"""Requests wait in the router while every replica is busy."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from kvroute.contract.priority import BATCH_S, Priority
from kvroute.router.api.errors import ApiError, response
from kvroute.router.observability.observers import RequestObservers
from kvroute.router.placement.attempts import (
    Attempt,
    RequestContext,
    RequestObserver,
)
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import Urgency, Wait
from kvroute.router.queueing import holding
from kvroute.router.queueing.holding import RECOVERY_S, Admitted, Holding
from kvroute.router.queueing.queue import DELAY, INTERACTIVE, Queue
from kvroute.router.queueing.refusals import too_long
from kvroute.router.queueing.wake import Wake
from tests.support.waiting import until

SHORT, LONG = 100, 60_000  # tokens
BATCH = Urgency("batch")


class Diary(RequestObserver):
    """Records the events of waiting requests."""

    def __init__(self) -> None:
        self.waits: list[Wait] = []
        self.refusals: list[tuple[Priority, str]] = []

    def waited(self, wait: Wait) -> None:
        self.waits.append(wait)

    def rejected(self, priority: Priority, refusal: str) -> None:
        self.refusals.append((priority, refusal))


class Router:
    """The parts of a router that queue requests, with a clock of its own."""

    def __init__(self, *replicas: str) -> None:
        self.now_s = 1000.0
        self.replicas = [*replicas]
        self.diary, wake = Diary(), Wake()
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=32,
            rng=random.Random(0),
            observer=RequestObservers(self.diary, wake),
        )
        self.queue = Queue[Any](lambda: self.fleet.loads.scale.busy_s)
        self.holding = Holding(
            self.queue, self.fleet, lambda: self.replicas, wake=wake, clock=lambda: self.now_s
        )
        self._prompts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Router"]:
        task = asyncio.create_task(self.holding.run())
        try:
            yield self
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.wait([task])

    def place(self, tokens: int) -> Any:
        self._prompts += 1
        prompt = np.full(tokens, self._prompts, np.uint32)
        return self.fleet.place(prompt, self.replicas, self.now_s)

    def send(self, tokens: int, replica: str, *, is_in_lane: bool = False) -> Attempt:
        """Send a request without a wait, as a batch request if it is in the lane."""
        placement, context = self.place(tokens), RequestContext(is_in_lane=is_in_lane)
        return self.fleet.sent(placement, replica, f"sent {self._prompts}", self.now_s, context)

    async def turn(self, tokens: int = SHORT, urgency: Urgency | None = None) -> Admitted:
        context = RequestContext(self.now_s, urgency=urgency or Urgency())
        return await self.holding.admit(self.place(tokens), context)

    async def asks(
        self, tokens: int = SHORT, urgency: Urgency | None = None
    ) -> "asyncio.Task[Admitted]":
        """Start a request, and return when it waits."""
        waiting = len(self.queue)
        self.now_s += 0.001  # no two requests arrive at the same time
        task = asyncio.create_task(self.turn(tokens, urgency))
        await until(lambda: len(self.queue) > waiting)
        return task


async def test_requests_do_not_wait_while_a_replica_is_free() -> None:
    router = Router("a", "b")
    router.send(LONG, "a")
    turn = await router.turn()  # no task runs that would release it
    assert turn.wait.reason == "none"
    assert router.diary.waits == []


async def test_a_request_waits_until_a_replica_is_free() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a")
        task = await router.asks()
        router.now_s += 1.5
        sent.first_token(router.now_s)
        wait = (await task).wait
    assert (wait.reason, wait.waited_s) == ("busy", 1.5)
    assert router.diary.waits == [wait]


async def test_short_prompts_pass_long_ones_and_each_is_sent_before_the_next_goes() -> None:
    router, went = Router("a"), list[str]()

    async def ask(name: str, tokens: int) -> None:
        await router.turn(tokens)
        went.append(name)
        router.send(LONG, "a")  # the replica takes one request at a time

    async with router.running():
        sent = router.send(LONG, "a")
        tasks = [asyncio.create_task(ask("long", LONG)), asyncio.create_task(ask("short", SHORT))]
        await until(lambda: len(router.queue) == 2)
        sent.first_token(router.now_s + 5)
        await until(lambda: bool(went))
        for _ in range(10):
            await asyncio.sleep(0)
        assert went == ["short"]
        for task in tasks:
            task.cancel()


async def test_a_request_whose_client_disconnects_leaves_the_queue() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        task = await router.asks()
        task.cancel()
        await asyncio.wait([task])
        assert not router.queue
        assert router.holding.states()["default"].requests == 0


async def test_a_client_that_disconnects_when_its_request_is_released_delays_no_other() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a")
        first, second = await router.asks(), await router.asks()
        sent.first_token(router.now_s + 5)
        first.cancel()
        assert (await second).wait.reason == "busy"


async def test_a_request_that_would_wait_too_long_is_refused() -> None:
    router = Router("a")
    router.send(LONG, "a")
    waiting = [await router.asks(LONG) for _ in range(5)]
    with pytest.raises(
        ApiError, match=r"would wait up to 56.6 s until .*, and --max-wait-s is 30 s"
    ) as error:
        await router.turn(LONG, Urgency(max_wait_s=30))
    assert (error.value.status, error.value.code) == (429, "wait_too_long")
    assert int(response(error.value).headers["retry-after"]) >= 1
    assert router.diary.refusals == [("default", "forecast")]
    assert len(router.queue) == len(waiting)
    for task in waiting:
        task.cancel()


async def test_a_refusal_has_a_time_for_the_retry() -> None:
    error = too_long(Urgency(max_wait_s=10, requested_wait_s=10), "would wait 31.5 s", 31.5)
    assert error.headers["retry-after"] == "22"
    assert "its deadline is 10 s; try again in 22 s" in error.message


async def test_a_request_that_has_waited_too_long_is_refused() -> None:
    router = Router("a")
    async with router.running():
        router.send(7_500, "a")  # slightly above the busy backlog
        with pytest.raises(ApiError, match=r"has waited 0 s until"):  # the time on the test's clock
            await router.turn(SHORT, Urgency("interactive", max_wait_s=0.1))
        assert not router.queue
    assert router.diary.refusals == [("interactive", "deadline")]


async def test_a_request_is_refused_if_even_an_empty_prompt_would_wait_too_long() -> None:
    router, hurried = Router("a"), Urgency(max_wait_s=1)
    router.holding.check(hurried)
    router.send(LONG, "a")
    router.holding.check(hurried)
    waiting = [await router.asks(30_000) for _ in range(3)]
    router.now_s += 300  # waiting requests come before new ones
    with pytest.raises(ApiError, match="would wait"):
        router.holding.check(hurried)
    router.holding.check(Urgency())  # a request without a deadline is not refused
    for task in waiting:
        task.cancel()


async def test_a_free_fleet_refuses_no_request() -> None:
    router = Router("a")
    for _ in range(50):  # many requests have arrived recently
        router.send(20_000, "a").first_token(router.now_s)
        await router.turn(20_000)
    router.holding.check(Urgency(delay_s=3600, max_wait_s=1))
    await router.turn(LONG, Urgency(delay_s=3600, max_wait_s=1))


async def test_a_request_is_refused_if_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "WAITING", 2)
    router = Router("a")
    router.send(LONG, "a")
    waiting = [await router.asks(), await router.asks()]
    with pytest.raises(ApiError, match="too many"):
        await router.turn()
    assert router.diary.refusals == [("default", "full")]
    for task in waiting:
        task.cancel()


async def test_requests_do_not_wait_for_ever_without_replicas() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        task = await router.asks()
        router.replicas.clear()
        router.now_s += RECOVERY_S + 1
        with pytest.raises(ApiError, match="no replica is ready") as error:
            await task
    assert error.value.status == 503
    assert router.diary.refusals == [("default", "no_replica")]


async def test_a_deadline_that_passes_without_a_replica_is_a_503() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        task = await router.asks(SHORT, Urgency(max_wait_s=20))
        router.replicas.clear()
        router.holding._overdue(next(iter(router.queue)))
        with pytest.raises(ApiError, match="no replica is ready"):
            await task


async def test_a_replica_that_starts_gets_the_waiting_requests() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        task = await router.asks()
        router.replicas.append("b")
        assert (await task).wait.reason == "busy"


async def test_batch_requests_do_not_wait_for_others_nor_others_for_them() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        batch = await router.turn(urgency=BATCH)
        assert (batch.is_in_lane, batch.allowed_ids) == (True, ["a"])
    router = Router("a")
    router.send(LONG, "a", is_in_lane=True)
    assert (await router.turn()).wait.reason == "none"  # no task runs that would release it


async def test_a_batch_request_does_not_wait_while_a_replica_has_room() -> None:
    router = Router("a")
    batch = await router.turn(urgency=BATCH)  # no task runs that would release it
    assert (batch.wait.reason, batch.is_in_lane, batch.allowed_ids) == ("none", True, ["a"])
    assert router.diary.waits == []


async def test_the_answer_to_a_batch_request_says_that_it_has_waited_for_room() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a", is_in_lane=True)
        task = await router.asks(urgency=BATCH)
        router.now_s += 2.0
        sent.end()
        wait = (await task).wait
    assert (wait.reason, wait.waited_s) == ("room", 2.0)


async def test_a_batch_request_waits_for_room_and_leaves_the_lane_after_a_time() -> None:
    router = Router("a")
    async with router.running():
        router.send(LONG, "a", is_in_lane=True)
        task = await router.asks(urgency=BATCH)
        router.now_s += BATCH_S + 1.0
        admitted = await task
    assert not admitted.is_in_lane
    assert not admitted.allowed_ids


async def test_an_interactive_request_goes_first_and_a_batch_one_last() -> None:
    router, went = Router("a"), list[str]()
    kinds: tuple[Priority, ...] = ("batch", "default", "interactive")

    async def ask(kind: Priority) -> None:
        await router.turn(SHORT, Urgency(kind))
        went.append(kind)

    async with router.running():
        sent = [router.send(LONG, "a", is_in_lane=is_in_lane) for is_in_lane in (False, True)]
        tasks = [asyncio.create_task(ask(kind)) for kind in kinds]
        await until(lambda: len(router.queue) == 3)
        for attempt in sent:
            attempt.first_token(router.now_s + 5)
        await asyncio.wait(tasks)
    assert went == ["interactive", "default", "batch"]


async def test_engines_get_the_same_order() -> None:
    router = Router("a")
    async with router.running():
        default = await router.turn(1000)
        interactive = await router.turn(1000, Urgency("interactive"))
        batch = await router.turn(1000, Urgency("batch"))
    assert batch.allowed_ids == ["a"]
    prefill_s = router.place(1000).ranking[0].own_s
    assert default.order_s - router.now_s == pytest.approx(DELAY * prefill_s)
    sooner_s = INTERACTIVE * router.fleet.loads.scale.busy_s
    assert default.order_s - interactive.order_s == pytest.approx(sooner_s)
    assert batch.order_s - router.now_s == pytest.approx(BATCH_S)


async def test_batch_requests_do_not_count_in_the_limit_of_other_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holding, "WAITING", 2)
    monkeypatch.setattr(holding, "WAITING_BATCH", 3)
    router = Router("a")
    async with router.running():
        router.send(LONG, "a")
        router.send(LONG, "a", is_in_lane=True)
        tasks = [await router.asks(urgency=BATCH) for _ in range(3)]
        tasks += [await router.asks() for _ in range(2)]
        for urgency in (BATCH, Urgency()):
            with pytest.raises(ApiError, match="too many requests are waiting"):
                await router.turn(urgency=urgency)
        for task in tasks:
            task.cancel()


async def test_forecasts_do_not_learn_from_batch_requests() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a", is_in_lane=True)
        task = await router.asks(urgency=BATCH)
        router.now_s += 200
        sent.end()
        assert (await task).wait.waited_s == pytest.approx(200)
    assert router.holding._correction.factor == 1.0


@pytest.mark.parametrize("own_s", [None, 0.2])
async def test_the_margin_learns_from_refused_requests_without_their_own_deadline(
    own_s: float | None,
) -> None:
    router = Router("a")
    async with router.running():
        router.send(8_600, "a")  # 0.15 s above the busy backlog
        with pytest.raises(ApiError, match="has waited"):
            await router.turn(SHORT, Urgency(max_wait_s=0.2, requested_wait_s=own_s))
    assert (router.holding.margin > 1.0) == (own_s is None)


async def test_replicas_get_the_wait_of_requests_that_were_refused() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a")
        with pytest.raises(ApiError, match="would wait"):
            await router.turn(LONG, Urgency(max_wait_s=0.5))
        sent.end()
        waits_s = [(await router.turn()).missed_s]
        waits_s.append((await router.turn(urgency=BATCH)).missed_s)
        router.now_s += holding.REFUSED_S
        waits_s.append((await router.turn()).missed_s)
    assert waits_s[0] > 0.5
    assert waits_s[1:] == [0.0, 0.0]


async def test_refusals_for_a_requests_own_deadline_do_not_scale_the_fleet() -> None:
    router = Router("a")
    async with router.running():
        sent = router.send(LONG, "a")
        with pytest.raises(ApiError, match="would wait"):
            await router.turn(LONG, Urgency(max_wait_s=0.5, requested_wait_s=0.5))
        sent.end()
        assert (await router.turn()).missed_s == 0.0
