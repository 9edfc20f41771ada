"""The end of a session is reported to every replica, and recorded in the router."""

import asyncio
import random
import time
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import Chunk, Emit, GenerateRequest
from kvroute.contract.keep import Order, RetentionHint, SessionTurn
from kvroute.features.gate import OPEN, Caller, Gate
from kvroute.features.placing_feature import PlacingFeatures
from kvroute.features.retention import Retention, router_retention
from kvroute.features.retention.replica_retention import ReplicaRetention
from kvroute.features.retention.router_retention import RouterRetention, report_end
from kvroute.router.api.errors import ApiError
from kvroute.router.api.sessions import session_number
from kvroute.router.application import _refuse
from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.serving.models import Models
from kvroute.router.sessions.turns import NO_HINTS, SessionHints
from tests.support.answers import completion
from tests.support.gates import ClosedGate
from tests.support.waiting import until
from tests.support.wired import Wired, dispatcher_of

PROMPT = np.arange(100, dtype=np.uint32)
LONGEST = 2**63 - 1


class Replicas:
    """Replicas that answer with one token, and record which ended sessions were reported."""

    def __init__(self, *ids: str, ranks: int = 1) -> None:
        self.reported: list[tuple[int, int]] = []  # session and rank of each report
        methods = {"end_session": self._end}
        self.wired = Wired(dict.fromkeys(ids, self._generate), methods, ranks=ranks)
        self.hang = False

    async def _generate(self, request: GenerateRequest, emit: Emit) -> None:
        emit(Chunk((1,), 0, is_last=True))

    async def _end(self, session: bytes, rank: int) -> bytes:
        if self.hang:
            await asyncio.Event().wait()
        self.reported.append((int.from_bytes(session, "little"), rank))
        return b""


async def test_the_end_of_a_session_is_reported_to_every_rank() -> None:
    replicas = Replicas("a", "b", ranks=2)
    async with replicas.wired as wired:
        assert await report_end(wired.links, LONGEST) == {}
    assert sorted(replicas.reported) == sorted(2 * [(LONGEST, 0), (LONGEST, 1)])


async def test_replicas_that_do_not_confirm_the_end_are_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas = Replicas("a", "b")
    async with replicas.wired as wired:
        wired.servers["a"].methods = {}
        (reason,) = (await report_end(wired.links, 5)).values()
        assert "has no method 'end_session'" in reason
        monkeypatch.setattr(router_retention, "TIMEOUT_S", 0.05)
        replicas.hang = True
        found = await report_end(wired.links, 5)
    assert "no answer within 0.05 s" in found["b"]


@pytest.mark.parametrize(
    "said", [SessionHints(5, is_end=True), SessionHints(is_end=True), SessionHints(5), NO_HINTS]
)
async def test_the_end_of_a_last_request_is_reported_to_all_replicas(said: SessionHints) -> None:
    replicas, ended = Replicas("a", "b"), RouterRetention()
    features = PlacingFeatures([ended])
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0), features=features)
    async with replicas.wired as wired:
        running = asyncio.create_task(ended.run(wired.links))
        context = RequestContext(time.monotonic(), hints=said)
        generation = await dispatcher_of(wired, fleet).generate(PROMPT, completion(), context)
        while await generation.next():
            assert replicas.reported == []
        if said.is_end:
            await until(lambda: len(replicas.reported) == 2)
            ((session, _), same) = replicas.reported
            assert session == same[0] == (said.session or session)
        else:
            assert ended._waiting.empty()
        running.cancel()


async def test_ended_sessions_that_wait_to_be_reported_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_retention, "MAX_WAITING", 3)
    ended = RouterRetention()
    for session in range(1, 9):
        turn = SessionTurn(Fingerprint(session), session, 1, is_last=True)
        for is_over, order in ((False, 0), (True, 1), (True, 0), (True, 0)):
            keep = RetentionHint(Order(order), session)
            context = RequestContext(0.0, turn=turn, keep=keep)
            attempt: Any = SimpleNamespace(context=context, is_over=is_over)
            ended.attempt_ended(attempt)
            is_told = session > 1 or (is_over and order == Order.ENDED)
            assert ended._waiting.empty() != is_told
    waiting = [ended._waiting.get_nowait() for _ in range(3)]
    assert (waiting, ended._waiting.empty()) == ([1, 1, 2], True)


@pytest.mark.parametrize("length", [0, 7, 9, 1_000_000])
async def test_a_sessions_number_has_eight_bytes(length: int) -> None:
    ended: list[int] = []

    async def end(session: int) -> None:
        ended.append(session)

    rank: Any = SimpleNamespace(engine=SimpleNamespace(end_session=end))
    method = ReplicaRetention([rank]).methods()["end_session"]
    await method(LONGEST.to_bytes(8, "little"), 0)
    with pytest.raises(ValueError, match=f"8 bytes, not {length}"):
        await method(bytes(length), 0)
    assert ended == [LONGEST]


class Application:
    """Return a client for the route of a router with two models."""

    def __init__(self, gate: Gate = OPEN) -> None:
        self.ended: dict[str, list[int]] = {"m": [], "n": []}
        models = object.__new__(Models)
        models.all = [self._model(name) for name in self.ended]
        models._started = 0
        http: Any = FastAPI()
        http.state.models, http.state.gate = models, gate
        for routes in Retention().routes():
            http.include_router(routes)
        http.exception_handler(ApiError)(_refuse)
        http.add_middleware(CallerCheck, gate=gate, refused=lambda error: None)
        transport = httpx.ASGITransport(http)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    def _model(self, name: str) -> Any:
        async def end(session: int) -> dict[str, str]:
            self.ended[name].append(session)
            return {} if name == "m" else {"n#1": "it is away"}

        return SimpleNamespace(
            name=name,
            cards=(),
            variant=lambda given, tenant="": "" if given == name else None,
            settings=SimpleNamespace(adapters=(), model="m"),
            status=SimpleNamespace(max_model_len=None),
            feature=lambda kind: SimpleNamespace(end=end),
        )


async def test_a_session_ends_for_every_model_or_for_one() -> None:
    application = Application()
    answer = await application.client.delete("/v1/sessions/chat/1%3F")
    assert (answer.status_code, answer.json()) == (
        200,
        {
            "id": "chat/1?",
            "object": "session",
            "deleted": True,
            "unanswered": {"n#1": "it is away"},
        },
    )
    number = session_number("", "chat/1?")
    assert application.ended == {"m": [number], "n": [number]}
    query = {"model": "m", "cache_salt": "s"}
    assert (await application.client.delete("/v1/sessions/x", params=query)).status_code == 200
    assert application.ended == {"m": [number, session_number("s", "x")], "n": [number]}
    query = {"model": "n", "session_id": "trained"}
    assert (await application.client.post("/finish_session", params=query)).status_code == 200
    assert application.ended["n"] == [number, session_number("", "trained")]


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/sessions/x?model=z", 404), (f"/v1/sessions/{'x' * 257}", 400)]
)
async def test_an_invalid_session_id_is_refused(path: str, status: int) -> None:
    application = Application()
    answer = await application.client.delete(path)
    assert (answer.status_code, "error" in answer.json()) == (status, True)
    assert application.ended == {"m": [], "n": []}


async def test_a_key_ends_sessions_of_its_tenant_only() -> None:
    callers = [Caller(tenant, salt=f"salt of {tenant}") for tenant in "ab"]
    application = Application(ClosedGate(*callers))
    for caller in callers:
        headers = {"x-api-key": caller.tenant}
        await application.client.delete("/v1/sessions/x", headers=headers)
    expected = [session_number(caller.salt, "x") for caller in callers]
    assert application.ended["m"] == expected
    assert len(set(expected)) == 2
