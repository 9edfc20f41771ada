"""A request that stops a replica is not sent to another; other requests are continued."""

import asyncio
import random
import socket
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kvroute.contract.generation import Chunk, Emit, EngineDeadError, GenerateRequest, TokenIds
from kvroute.contract.messages import decode, encode
from kvroute.contract.preparation import prepared
from kvroute.doctor.checks import blamed as doctors_view
from kvroute.router.api.errors import ApiError, response
from kvroute.router.connections import links
from kvroute.router.connections.links import HungError
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.dispatch.blamed import MAX_REQUESTS, REFUSED_S, PoisonList
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.link import LostError
from tests.support.answers import completion
from tests.support.waiting import until
from tests.support.wired import Wired, dispatcher_of

PROMPT = np.arange(100, dtype=np.uint32)
HUNG = HungError("replica r0 does not answer")


def request_of(prompt: TokenIds = PROMPT, **fields: Any) -> GenerateRequest:
    return GenerateRequest("id-1", prompt, call=completion(**fields))


def preparing(wired: Wired, replica_id: str) -> int:
    """Return how many requests a replica prepares, as the router knows it."""
    link = wired.links._links[replica_id]
    return sum(stream.is_preparing for stream in link._streams.values())


class Replicas:
    """Two replicas: r0 does not answer until it is lost, or dies of each request. r1 answers."""

    def __init__(
        self, *, is_prepared: bool = False, dies: bool = False, silent_port: int | None = None
    ) -> None:
        self.asked: list[str] = []
        self._silent_port = silent_port  # None: the machine of r0 answers
        self._is_prepared = is_prepared
        self._dies = dies
        self._wired = Wired({"r0": self._hangs, "r1": self._answers})
        fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
        self.dispatcher = dispatcher_of(self._wired, fleet)

    async def _hangs(self, request: GenerateRequest, emit: Emit) -> None:
        self.asked.append("r0")
        if self._is_prepared:
            prepared()
        await asyncio.Event().wait()

    async def _answers(self, request: GenerateRequest, emit: Emit) -> None:
        self.asked.append("r1")
        if self._dies:
            raise EngineDeadError("as planned")
        emit(Chunk((1,), 0, is_last=True))

    async def lose(self, error: Exception, *prompts: TokenIds) -> list[Any]:
        """Return what becomes of requests to r0, which is lost with this error, and of the first
        one when its client sends it again."""
        async with self._wired:
            self._wired.drop("r1")
            await until(lambda: self._wired.links.connected() == ["r0"])
            tasks = [asyncio.create_task(self._ask(prompt)) for prompt in prompts]
            await until(lambda: len(self.asked) == len(prompts))
            await until(lambda: self._wired.links.received_messages("r0") > len(prompts))
            prepares = 0 if self._is_prepared else len(prompts)
            await until(lambda: preparing(self._wired, "r0") == prepares)
            self._wired.list("r1")
            await until(lambda: "r1" in self._wired.links.connected())
            if self._silent_port:
                addresses = self._wired.links._addresses
                addresses["r0"] = replace(addresses["r0"], port=self._silent_port)
            self._wired.links.lose("r0", error)
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            self._wired.drop("r0")
            return [*ended, *await asyncio.gather(self._ask(prompts[0]), return_exceptions=True)]

    async def _ask(self, prompt: TokenIds) -> str:
        context = RequestContext(time.monotonic())
        return (await self.dispatcher.generate(prompt, completion(), context)).replica_id


async def test_a_request_that_stops_a_replica_is_not_sent_to_another() -> None:
    replicas = Replicas()
    first, again = await replicas.lose(HUNG, PROMPT)
    assert replicas.asked == ["r0"]
    for refused in (first, again):
        assert isinstance(refused, ApiError)
        assert (refused.status, refused.code) == (400, "request_blamed")
        assert "replica r0 stopped while it prepared this request" in refused.message
        assert response(refused).headers["x-should-retry"] == "false"


async def test_a_request_that_has_reached_the_engine_is_not_blamed_for_a_hang() -> None:
    assert await Replicas(is_prepared=True).lose(HUNG, PROMPT) == ["r1", "r1"]


async def test_no_request_is_blamed_if_the_replicas_machine_is_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Linux answers no further connection when two wait to be accepted at this port."""
    monkeypatch.setattr(links, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as waiting:
        for _ in range(2):
            one = waiting.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex(server.getsockname())
        replicas = Replicas(silent_port=server.getsockname()[1])
        assert await replicas.lose(HUNG, PROMPT) == ["r1", "r1"]


async def test_several_requests_in_preparation_are_not_blamed_for_one_hang() -> None:
    assert await Replicas().lose(HUNG, PROMPT, PROMPT + 1) == ["r1", "r1", "r1"]


async def test_requests_that_stop_two_replicas_together_are_not_sent_to_a_third() -> None:
    asked: list[str] = []

    async def hangs(request: GenerateRequest, emit: Emit) -> None:
        asked.append(request.request_id)
        await asyncio.Event().wait()

    wired = Wired({f"r{number}": hangs for number in range(3)})
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    async with wired:
        for replica_id in ("r1", "r2"):
            wired.drop(replica_id)
        await until(lambda: wired.links.connected() == ["r0"])
        begin, context = dispatcher_of(wired, fleet).generate, RequestContext(time.monotonic())
        tasks = [
            asyncio.create_task(begin(prompt, completion(), context))
            for prompt in (PROMPT, PROMPT + 1)
        ]
        for asks, stopped, following in ((2, "r0", "r1"), (4, "r1", "r2")):
            await until(lambda: len(asked) >= asks)  # noqa: B023
            await until(lambda: preparing(wired, stopped) == 2)  # noqa: B023
            wired.list(following)
            await until(lambda: following in wired.links.connected())  # noqa: B023
            wired.links.lose(stopped, HungError(stopped))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(error, "code", "") for error in ended] == ["request_blamed"] * 2
    assert len(asked) == 4


async def test_no_request_is_blamed_for_a_replica_that_is_killed() -> None:
    assert await Replicas().lose(LostError("killed"), PROMPT) == ["r1", "r1"]


async def test_a_request_that_two_replicas_died_of_is_refused_from_then_on() -> None:
    replicas = Replicas(dies=True)
    first, again = await replicas.lose(EngineDeadError("as planned"), PROMPT)
    assert (first.code, again.code) == ("replicas_died", "request_blamed")
    assert "replicas r0 and r1 died soon" in again.message
    assert replicas.asked == ["r0", "r1"]


def is_refused(blamed: PoisonList, request: GenerateRequest) -> bool:
    try:
        blamed.check(request)
    except ApiError:
        return True
    return False


def test_a_blamed_request_is_recognised_by_its_content_for_some_minutes() -> None:
    now_s = [0.0]
    blamed = PoisonList(clock=lambda: now_s[0])
    blamed.add(request_of(), "it stopped r0")
    assert is_refused(blamed, request_of())
    assert is_refused(blamed, request_of().after([1, 2]))
    assert not is_refused(blamed, request_of(PROMPT + 1))
    assert not is_refused(blamed, request_of(stop="a"))
    now_s[0] = REFUSED_S + 1
    assert not is_refused(blamed, request_of())
    assert blamed.as_json() == []


def test_the_number_of_blamed_requests_is_bounded() -> None:
    blamed = PoisonList()
    for number in range(MAX_REQUESTS + 1):
        blamed.add(request_of(PROMPT + number), "it stopped r0")
    assert len(blamed.as_json()) == MAX_REQUESTS
    assert not is_refused(blamed, request_of())
    assert is_refused(blamed, request_of(PROMPT + MAX_REQUESTS))


def test_routers_share_blamed_requests() -> None:
    publisher, there = PeerPublisher("here"), PoisonList()
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    subscriber = PeerSubscriber(fleet, own="there", blamed=there.receive)
    PoisonList(publisher.blamed).add(request_of(), "it stopped r0")
    subscriber.receive(decode(encode(publisher.next_message())))
    assert is_refused(there, request_of())


def test_the_doctor_reports_blamed_requests() -> None:
    blamed = PoisonList()
    assert doctors_view([]).grade == "ok"
    blamed.add(request_of(), "replica r0 stopped")
    found = doctors_view([{"model": "m", **each} for each in blamed.as_json()])
    assert (found.grade, "replica r0 stopped" in found.finding) == ("warning", True)
