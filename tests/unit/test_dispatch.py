"""The dispatcher returns one stream of chunks for a prompt, even if replicas are lost."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from starlette.requests import ClientDisconnect

from kvroute.blocks.fingerprint import MediaSpan
from kvroute.contract.generation import (
    Chunk,
    Emit,
    EngineDeadError,
    Generate,
    GenerateRequest,
    NotBegunError,
    TokenIds,
)
from kvroute.contract.priority import Priority
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, response
from kvroute.router.connections.links import UnansweredError
from kvroute.router.dispatch.dispatcher import TRIES
from kvroute.router.dispatch.losses import (
    CAUSED,
    LOSSES,
    SOON_TOKENS,
    Losses,
)
from kvroute.router.dispatch.questions import MAX_EXTRA_CALLS
from kvroute.router.dispatch.relay import placement_headers
from kvroute.router.placement.attempts import Attempt, RequestContext, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import Urgency
from kvroute.router.serving.responding import written
from kvroute.wire.framing import MessageKind
from kvroute.wire.server import Peer
from tests.support.answers import (
    COMPLETIONS,
    completion,
    data_of,
    end_of,
    ids_of,
    logprobs_of,
    status_of,
    text_of,
)
from tests.support.chunks import emitting, streamed
from tests.support.rounds import Rounds, most_in_a_round
from tests.support.waiting import until
from tests.support.wired import Wired, dispatcher_of, questions_of

PROMPT = np.arange(100, dtype=np.uint32)
IMMORTAL = -1
MANY = 30  # prompts of one call
CALL = Call(COMPLETIONS, b"", {})
SCOPE = {"type": "http", "asgi": {"spec_version": "2.4"}}
GONE = -2  # a replica whose connection ends when the request arrives
NOT_BEGUN = -3  # a replica whose engine cannot begin with the request
INSTANT = SimulatedConfig(prefill_tokens_per_s=0, decode_step_s=0, decode_per_seq_s=0)


class Engines:
    """The one that is asked first dies after lives[0] chunks, the next one after lives[1], and so
    on."""

    latest: "Engines | None" = None

    def __init__(self, lives: Sequence[int]) -> None:
        self.all = {f"r{number}": SimulatedEngine(INSTANT) for number in range(len(lives))}
        self.requests: list[GenerateRequest] = []
        self._lives = lives
        Engines.latest = self

    def generates(self) -> dict[str, Generate]:
        return {id_: emitting(partial(self._chunks, id_)) for id_ in self.all}

    def is_next_gone(self) -> bool:
        """Return whether the replica that gets the next request is gone."""
        number = len(self.requests)
        return GONE in self._lives[number : number + 1]

    async def _chunks(self, id_: str, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        life = self._lives[len(self.requests) - 1]
        if life == NOT_BEGUN:
            raise NotBegunError("as planned")
        async with aclosing(streamed(self.all[id_].generate, request)) as chunks:
            async for chunk in chunks:
                if life == 0:
                    break
                life -= 1
                yield chunk
        if life == 0:
            raise EngineDeadError("as planned")


class Diary(RequestObserver):
    """Records attempts that have ended, and refusals."""

    def __init__(self) -> None:
        self.attempts: list[Attempt] = []
        self.refusals: list[tuple[Priority, str]] = []

    def rejected(self, priority: Priority, refusal: str) -> None:
        self.refusals.append((priority, refusal))

    def ended(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)


class Client:
    """Sends requests through a dispatcher."""

    def __init__(self, *lives: int, most: int = 1000) -> None:
        self.engines = Engines(lives)
        self.requests = self.engines.requests
        self.diary = Diary()
        self.fleet = Fleet(
            model="m", revision="", block_size=32, rng=random.Random(0), observer=self.diary
        )
        self.wired = Wired(self.engines.generates(), most=most)
        self.dispatcher = dispatcher_of(self.wired, self.fleet)
        self.questions = questions_of(self.wired, self.dispatcher)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator["Client"]:
        async with self.wired:
            yield self
        for engine in self.engines.all.values():
            await engine.close()

    async def ask(self, prompt: TokenIds = PROMPT, **fields: Any) -> list[Chunk]:
        async with self.serving():
            return await self.asked(prompt, **fields)

    async def asked(self, prompt: TokenIds = PROMPT, **fields: Any) -> list[Chunk]:
        """Run the replicas and the router during the block."""
        call = completion(**{"max_tokens": 12} | fields)
        generation = await self.dispatcher.generate(prompt, call, RequestContext(time.monotonic()))
        chunks = []
        while chunk := await generation.next():
            chunks.append(chunk)
        return chunks


async def test_images_with_equal_content_go_to_the_same_replica() -> None:
    client, prompt = Client(3, IMMORTAL, IMMORTAL), np.full(100, 7, np.uint32)
    cat, dog = (MediaSpan("cat", 40, 20),), (MediaSpan("dog", 40, 20),)
    now_s = time.monotonic()
    async with client.serving():
        for media in (cat, dog):
            context = RequestContext(now_s, media=media)
            generation = await client.dispatcher.generate(prompt, completion(), context)
            while await generation.next():
                pass
    chains = [attempt.placement.chain for attempt in client.diary.attempts if attempt.placement]
    assert chains[0] == chains[1][: len(chains[0])]  # the second replica continued it
    assert chains[2][:1] == chains[0][:1]
    assert not {*chains[2][1:]} & {*chains[0][1:]}


async def test_a_request_without_a_ready_replica_before_its_deadline_is_counted() -> None:
    client = Client()
    context = RequestContext(time.monotonic(), urgency=Urgency("interactive", requested_wait_s=0.0))
    with pytest.raises(ApiError, match="no replica is ready"):
        await client.dispatcher.generate(PROMPT, completion(), context)
    assert client.diary.refusals == [("interactive", "no_replica")]


@pytest.fixture(autouse=True)
def _gone_replicas_take_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Peer.send

    def send_unless_gone(peer: Peer, kind: MessageKind, payload: bytes) -> None:
        if kind == MessageKind.TAKEN and Engines.latest and Engines.latest.is_next_gone():
            peer.abort("as planned")
        send(peer, kind, payload)

    monkeypatch.setattr(Peer, "send", send_unless_gone)


def said(chunks: list[Chunk]) -> tuple[str, list[int], list[Any], str | None]:
    return text_of(chunks), ids_of(chunks), logprobs_of(chunks), end_of(chunks)


@pytest.mark.parametrize("lives", [[0], [1], [5], [11], [12], [3, GONE], [GONE] * (LOSSES - 1)])
async def test_an_answer_is_the_same_when_replicas_are_lost(lives: list[int]) -> None:
    undisturbed = await Client(IMMORTAL).ask(logprobs=1)
    assert said(await Client(*lives, IMMORTAL).ask(logprobs=1)) == said(undisturbed)


@pytest.mark.parametrize("lives", [[NOT_BEGUN] * LOSSES, [5, *[NOT_BEGUN] * CAUSED]])
async def test_engines_that_cannot_begin_with_a_request_are_no_losses(lives: list[int]) -> None:
    """Attached servers cannot continue each answer that another engine has begun."""
    undisturbed = await Client(IMMORTAL).ask(logprobs=1)
    client = Client(*lives, IMMORTAL)
    assert said(await client.ask(logprobs=1)) == said(undisturbed)
    assert len(client.requests) == len(lives) + 1


@pytest.mark.parametrize("life", range(1, 8))
async def test_a_stop_string_ends_the_answer_even_if_two_replicas_generate_it(life: int) -> None:
    whole = text_of(await Client(IMMORTAL).ask())
    stop = whole[len(whole) // 2 - 8 :][:8]
    undisturbed = await Client(IMMORTAL).ask(stop=stop)
    assert end_of(undisturbed) == "stop"
    assert said(await Client(life, IMMORTAL).ask(stop=stop)) == said(undisturbed)


@pytest.mark.parametrize("life", [0, 1, 5, 11])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_response_has_the_same_bytes_when_a_replica_is_lost(path: str, life: int) -> None:
    """Return the data without the id, which differs between requests."""
    with_logprobs = {"stream": False, "logprobs": True if "chat" in path else 1}
    kinds: list[dict[str, Any]] = [{}, with_logprobs]
    for fields in kinds:
        undisturbed = await Client(IMMORTAL).ask(path=path, **fields)
        disturbed = await Client(life, IMMORTAL).ask(path=path, **fields)
        assert data_of(disturbed) == data_of(undisturbed)
        assert status_of(disturbed) == 200


async def test_the_next_replica_gets_the_tokens_that_were_generated() -> None:
    client = Client(5, IMMORTAL)
    chunks = await client.ask()
    first, second = client.requests
    assert first.answered == 0
    assert second.answered_ids.tolist() == said(chunks)[1][:5]
    assert second.prompt_ids.tolist() == PROMPT.tolist()


async def test_a_replica_that_is_lost_after_the_last_token_needs_no_successor() -> None:
    client = Client(12, IMMORTAL)
    await client.ask()
    assert len(client.requests) == 1


async def test_an_answer_that_cannot_be_continued_exactly_ends_with_an_error() -> None:
    with pytest.raises(ApiError, match="n above 1"):
        await Client(5, IMMORTAL).ask(n=2, temperature=1.0)


async def test_an_answer_that_cannot_be_continued_starts_again_if_nothing_was_sent() -> None:
    whole: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 1, "stream": False}
    undisturbed = await Client(IMMORTAL).ask(**whole)
    assert data_of((await Client(5, IMMORTAL).ask(**whole))[-1:]) == data_of(undisturbed)


async def test_a_request_fails_after_too_many_replicas_that_were_dead_before() -> None:
    client = Client(*[GONE] * LOSSES, IMMORTAL)
    with pytest.raises(ApiError, match="was lost while it answered, and 4 other replicas"):
        await client.ask()
    assert len(client.requests) == LOSSES


@pytest.mark.parametrize("lives", [[0, 0], [1, 1], [GONE, SOON_TOKENS, GONE, 1]])
async def test_a_request_that_two_replicas_died_of_is_not_sent_to_a_third(lives: list[int]) -> None:
    client = Client(*lives, IMMORTAL, IMMORTAL)
    with pytest.raises(ApiError, match=r"may be the cause.* reported: as planned") as ended:
        await client.ask(max_tokens=100)
    assert len(client.requests) == len(lives)
    assert response(ended.value).headers["x-should-retry"] == "false"


async def test_a_request_that_makes_progress_is_not_blamed() -> None:
    lives = [SOON_TOKENS + 1] * (CAUSED + 1)
    undisturbed = await Client(IMMORTAL).ask(max_tokens=100)
    client = Client(*lives, IMMORTAL)
    assert said(await client.ask(max_tokens=100)) == said(undisturbed)


async def test_hangs_do_not_count_as_deaths() -> None:
    lost = Losses()
    for number in range(CAUSED):
        lost.add(f"r{number}", died=False, is_excluded=True, was_taken=True, tokens=0)
    lost.check()
    for number in range(CAUSED):
        lost.add(f"d{number}", died=True, is_excluded=True, was_taken=True, tokens=0)
    with pytest.raises(ApiError, match="d0 and d1 died"):
        lost.check()


async def test_a_lost_replica_has_no_load_left() -> None:
    client = Client(5, GONE, IMMORTAL)
    await client.ask()
    ids = [*client.wired.ids()]
    candidates = client.fleet.place_chain([], 1, ids, now_s=time.monotonic()).ranking
    assert [(candidate.backlog_s, candidate.decode_step_s) for candidate in candidates] == [
        (0, 0)
    ] * 3


async def test_a_client_that_disconnects_early_leaves_no_load() -> None:
    client = Client(IMMORTAL, IMMORTAL)
    for id_, step_s in (("r0", 0.1), ("r1", 1000)):
        client.engines.all[id_] = SimulatedEngine(replace(INSTANT, decode_step_s=step_s))
    prompts = [(PROMPT + n, completion(max_tokens=8000)) for n in range(2)]
    async with client.serving():
        context = RequestContext(time.monotonic(), prompts=len(prompts))
        starters = client.dispatcher.starters(prompts, context)
        asking = asyncio.create_task(written(CALL, starters, prompts=2, policy=""))
        await until(lambda: any(load.decoding for load in client.fleet.loads.by_id().values()))
        asking.cancel()
        await asyncio.wait([asking])
        assert [load.unanswered for load in client.fleet.loads.by_id().values()] == [0, 0]
        await until(lambda: not any(server.running for server in client.wired.servers.values()))


async def left(*_: object) -> Any:
    raise OSError("the client has disconnected")


@pytest.mark.parametrize("leaves_early", [False, True])
async def test_the_prompts_of_a_call_begin_and_end_one_by_one(leaves_early: bool) -> None:
    """However many prompts one client sends, others wait for no more than one of them."""
    client, prompts = Client(*[IMMORTAL] * MANY), [(PROMPT + n, completion()) for n in range(MANY)]
    begun, ended = list[int](), list[int]()
    if leaves_early:  # before the first token of any prompt
        slow = replace(INSTANT, prefill_tokens_per_s=1)
        client.engines.all |= {id_: SimulatedEngine(slow) for id_ in client.wired.ids()}
    async with client.serving():
        rounds = Rounds()
        placed = client.fleet.place
        client.fleet.place = lambda *args, **named: (  # type: ignore[method-assign]
            begun.append(rounds.count) or placed(*args, **named)  # type: ignore[func-returns-value]
        )
        client.diary.ended = lambda attempt: ended.append(rounds.count)  # type: ignore[method-assign]
        context = RequestContext(time.monotonic(), prompts=MANY)
        starters = client.dispatcher.starters(prompts, context)
        asking = asyncio.create_task(written(CALL, starters, prompts=MANY, policy=""))
        if leaves_early:
            await until(lambda: len(begun) == MANY)
            asking.cancel()
            await asyncio.wait([asking])
        else:
            with pytest.raises(ClientDisconnect):
                await (await asking)(SCOPE, left, left)
    assert len(begun) == len(ended) == MANY
    assert most_in_a_round(begun) <= 2
    assert most_in_a_round(ended) <= 2


@pytest.mark.parametrize("stops", [False, True])
async def test_a_request_that_a_replica_refuses_goes_to_the_next_one(stops: bool) -> None:
    async with Client(IMMORTAL, IMMORTAL).serving() as client:
        for server in (first := [*client.wired.servers.values()][:1]):
            server.stop() if stops else setattr(server, "_max_requests", 0)
        for _ in range(20):
            client.engines.requests.clear()
            assert len(await client.asked()) > 0
        assert first[0].refusals > 0
        outcomes = {(attempt.replica_id, attempt.outcome) for attempt in client.diary.attempts}
        assert outcomes == {("r0", "moved"), ("r1", "ok")}


@pytest.mark.parametrize("priority", ["default", "batch"])
@pytest.mark.parametrize("refusing", [1, TRIES + 1])
async def test_replicas_that_refuse_a_request_are_asked_again_after_all_others(
    priority: Priority, refusing: int
) -> None:
    """The queue chooses one replica for a batch request, and a round asks TRIES replicas."""
    asked: list[str] = []

    async def generate(id_: str, request: GenerateRequest, emit: Emit) -> None:
        asked.append(id_)
        if id_ in asked[:refusing]:
            raise NotBegunError("as planned")
        emit(Chunk((1,), 0, is_last=True))

    wired = Wired({f"r{n}": partial(generate, f"r{n}") for n in range(refusing + 1)})
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    context = RequestContext(time.monotonic(), urgency=Urgency(priority))
    async with wired, asyncio.timeout(30):
        answer = await dispatcher_of(wired, fleet).generate(PROMPT, completion(), context)
        assert (await answer.next()) is not None
        answer.close()
    assert len(asked) == len({*asked}) == refusing + 1


async def test_a_request_waits_while_all_replicas_are_full_and_too_many_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.router.dispatch.dispatcher.WAITING", 2)
    # A request counts as waiting only during a pause, so the third one must arrive in one.
    monkeypatch.setattr("kvroute.router.dispatch.admission.FIRST_PAUSE_S", 0.5)
    async with Client(*[IMMORTAL] * 4, most=0).serving() as client:
        waiting = [asyncio.create_task(client.asked()) for _ in range(2)]
        await until(lambda: client.dispatcher._waiting == 2)
        with pytest.raises(ApiError, match="too many requests") as refused:
            await client.asked()
        assert refused.value.status == 429
        for server in client.wired.servers.values():
            server._max_requests = 1
        answers = await asyncio.gather(*waiting)
    assert [said(chunks)[3] for chunks in answers] == ["length"] * 2


@pytest.mark.parametrize("requested_wait_s", [None, 0.1])
async def test_a_request_that_all_replicas_keep_refusing_gets_an_error_with_the_reason(
    requested_wait_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 0.2 if requested_wait_s is None else 60.0
    monkeypatch.setattr("kvroute.router.dispatch.admission.RECOVERY_S", limit_s)
    context = RequestContext(time.monotonic(), urgency=Urgency(requested_wait_s=requested_wait_s))
    async with Client(IMMORTAL, IMMORTAL).serving() as client:
        for server in client.wired.servers.values():
            server.away_reason = "it is in the garage"
        with pytest.raises(ApiError, match="it is in the garage") as refused:
            await client.dispatcher.generate(PROMPT, completion(), context)
    assert refused.value.status == 503
    assert refused.value.code == "unavailable"


async def test_a_connection_that_is_closing_gets_no_requests() -> None:
    """The loop hears of the end only in its next round; a request must not ask there again and
    again until then."""
    async with Client(IMMORTAL, IMMORTAL).serving() as client:
        link = client.wired.links._links["r0"]
        assert link.transport
        link.transport.abort()
        assert not link.closed.done()
        assert client.wired.links.connected() == ["r1"]
        assert said(await client.asked())[3] == "length"
        assert {attempt.replica_id for attempt in client.diary.attempts} == {"r1"}


@pytest.mark.parametrize("replicas", [1, 2])
async def test_a_replica_whose_connection_ends_has_lost_its_requests(replicas: int) -> None:
    """The requests continue on another replica, or on this one when it is connected again."""
    undisturbed = await Client(IMMORTAL).ask(max_tokens=400)
    client = Client(*[IMMORTAL] * replicas)
    client.engines._lives = [IMMORTAL] * 2
    client.engines.all |= {
        id_: SimulatedEngine(replace(INSTANT, decode_step_s=0.001)) for id_ in client.engines.all
    }
    async with client.serving():
        asking = asyncio.create_task(client.asked(max_tokens=400))
        await until(lambda: any(load.decoding for load in client.fleet.loads.by_id().values()))
        (server,) = (server for server in client.wired.servers.values() if server.running)
        for peer in server.peers:
            peer.abort("as planned")
        assert said(await asking) == said(undisturbed)
        assert [attempt.outcome for attempt in client.diary.attempts] == ["failed", "ok"]
        await until(lambda: len(client.wired.links.connected()) == replicas)  # again


async def test_every_attempt_ends_once_with_its_outcome() -> None:
    client = Client(5, GONE, IMMORTAL)
    await client.ask()
    lost, never_begun, last = client.diary.attempts
    assert [attempt.outcome for attempt in client.diary.attempts] == ["failed", "failed", "ok"]
    assert [attempt.output_tokens for attempt in client.diary.attempts] == [5, 0, 7]
    assert (lost.cached_tokens, never_begun.cached_tokens) == (0, None)
    assert not lost.context.is_resumed
    assert last.context.is_resumed
    assert last.context.ready_s == lost.context.ready_s < last.sent_s


async def test_an_attempt_that_the_engine_refuses_has_its_own_outcome() -> None:
    client = Client(IMMORTAL)
    chunks = await client.ask(np.zeros(9000, np.uint32))
    assert status_of(chunks) == 400
    assert b"9000 tokens" in data_of(chunks)
    assert [attempt.outcome for attempt in client.diary.attempts] == ["refused"]


async def test_a_call_that_two_engines_died_of_is_not_sent_to_a_third() -> None:
    client, asked = Client(*[IMMORTAL] * 4), list[str]()

    async def die(id_: str, _: bytes, rank: int) -> bytes:
        asked.append(id_)
        raise EngineDeadError("as planned")

    async with client.serving():
        for id_, server in client.wired.servers.items():
            server.methods = {"http": partial(die, id_)}
        with pytest.raises(ApiError, match=r"may be the cause.* reported: as planned"):
            await client.questions.ask("http", b"a")
    assert len(asked) == CAUSED


def answering(client: Client, over: asyncio.Event) -> list[str]:
    """The replicas that are asked, as they are; they answer with the question once that is set."""
    asked: list[str] = []

    async def answer(id_: str, body: bytes, rank: int) -> bytes:
        asked.append(id_)
        await over.wait()
        return body

    for id_, server in client.wired.servers.items():
        server.methods = {"http": partial(answer, id_)}
    return asked


async def test_a_call_goes_to_a_replica_with_the_fewest_pending_calls() -> None:
    client, over = Client(*[IMMORTAL] * 3), asyncio.Event()
    async with client.serving():
        asked = answering(client, over)
        asking = [asyncio.create_task(client.questions.ask("http", b"a")) for _ in range(6)]
        await until(lambda: len(asked) == 6)
        over.set()
        assert await asyncio.gather(*asking) == [b"a"] * 6
    assert sorted(asked) == ["r0", "r0", "r1", "r1", "r2", "r2"]


async def test_a_preferred_replica_is_called_unless_it_has_many_more_pending_calls() -> None:
    client, over = Client(*[IMMORTAL] * 2), asyncio.Event()
    async with client.serving():
        asked = answering(client, over)
        asking = [
            asyncio.create_task(client.questions.ask("http", b"a", prefer=max))
            for _ in range(MAX_EXTRA_CALLS + 2)
        ]
        await until(lambda: len(asked) == MAX_EXTRA_CALLS + 2)
        over.set()
        await asyncio.gather(*asking)
        assert sorted(asked) == ["r0", *["r1"] * (MAX_EXTRA_CALLS + 1)]
        client.wired.drop("r1")
        await until(lambda: client.wired.links.connected() == ["r0"])
        assert await client.questions.ask("http", b"b", prefer=max) == b"b"


async def test_a_replica_that_cannot_be_reached_is_named_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvroute.router.connections.links.REPORT_AFTER_S", 0.0)
    async with Client(IMMORTAL, IMMORTAL).serving() as client:
        await client.wired.servers["r0"].close()
        links = client.wired.links
        await until(lambda: links.unconnected().keys() == {"r0"})
        assert links.connected() == ["r1"]
        with pytest.raises(UnansweredError, match="there is no connection: 127"):
            await links.call("r0", "render", b"", within_s=5)
        client.wired.drop("r0")
        await until(lambda: not links.unconnected())


async def test_a_replica_that_serve_stops_finishes_what_it_runs() -> None:
    client = Client(IMMORTAL, IMMORTAL)
    slow = replace(INSTANT, decode_step_s=0.005)
    client.engines.all |= {id_: SimulatedEngine(slow) for id_ in client.engines.all}
    async with client.serving():
        asking = asyncio.create_task(client.asked(max_tokens=60))
        await until(lambda: any(load.decoding for load in client.fleet.loads.by_id().values()))
        ((stopped, server),) = (
            (id_, each) for id_, each in client.wired.servers.items() if each.running
        )
        client.wired.drop(stopped)
        server.stop()
        await server.idle()
        assert said(await asking)[3] == "length"
        assert [attempt.outcome for attempt in client.diary.attempts] == ["ok"]
        await until(lambda: not server.peers)


# Waiting in the queue.


def keep_busy(client: Client) -> list[Attempt]:
    """Return attempts that keep every replica busy until they end."""
    now_s, tokens = time.monotonic(), np.full(100_000, 3, np.uint32)
    placement = client.fleet.place(tokens, list(client.engines.all), now_s)
    return [client.fleet.sent(placement, id_, f"long {id_}", now_s) for id_ in client.engines.all]


@contextlib.asynccontextmanager
async def releasing(client: Client) -> AsyncIterator[None]:
    """Release waiting requests during the block."""
    async with client.serving():
        task = asyncio.create_task(client.dispatcher.control.holding.run())
        yield
        task.cancel()
        await asyncio.wait([task])


def waiting(client: Client) -> int:
    return client.dispatcher.control.holding.states()["default"].requests


async def test_a_request_that_waited_for_a_busy_replica_reports_its_wait() -> None:
    client, context = Client(IMMORTAL, IMMORTAL), RequestContext(time.monotonic())
    async with releasing(client):
        busy = keep_busy(client)
        begun = asyncio.create_task(client.dispatcher.generate(PROMPT, completion(), context))
        await until(lambda: waiting(client))
        assert client.requests == []
        busy[1].end()
        generation = await begun
        headers = placement_headers([generation])
        generation.close()
    assert generation.replica_id == "r1"
    assert (
        client.requests[0].order_s < 0.5
    )  # a short prompt that has waited has an early order time
    assert headers["x-kvroute-queued-for"] == "busy"
    assert float(headers["x-kvroute-queued-s"]) > 0


async def test_a_request_that_did_not_wait_reports_no_wait() -> None:
    client, context = Client(IMMORTAL), RequestContext(time.monotonic())
    async with client.serving():
        generation = await client.dispatcher.generate(PROMPT, completion(), context)
        generation.close()
    headers = placement_headers([generation])
    assert headers["x-kvroute-queued-for"] == "none"
    assert headers["x-kvroute-queued-s"] == "0.000"


async def test_a_client_that_disconnects_while_waiting_causes_no_work() -> None:
    client, context = Client(IMMORTAL), RequestContext(time.monotonic())
    async with releasing(client):
        busy = keep_busy(client)
        begun = asyncio.create_task(client.dispatcher.generate(PROMPT, completion(), context))
        await until(lambda: waiting(client))
        begun.cancel()
        await asyncio.wait([begun])
        assert not waiting(client)
        busy[0].end()
        await client.asked()
    assert len(client.requests) == 1


async def test_an_answer_whose_replica_was_lost_does_not_wait_again() -> None:
    client = Client(3, IMMORTAL)
    async with client.serving():  # no task runs that would release it
        context = RequestContext(time.monotonic())
        generation = await client.dispatcher.generate(PROMPT, completion(max_tokens=12), context)
        keep_busy(client)
        while await generation.next():
            pass
    assert len(client.requests) == 2
    assert client.requests[1].order_s <= 0


async def test_only_the_first_prompt_of_a_call_has_a_wait_limit() -> None:
    client = Client(IMMORTAL)
    context = RequestContext(time.monotonic() - 1, urgency=Urgency(max_wait_s=0.001), prompts=2)
    async with releasing(client):
        busy = keep_busy(client)
        with pytest.raises(ApiError, match="would wait"):
            await client.dispatcher.generate(PROMPT, completion(), context)
        begun = asyncio.create_task(
            client.dispatcher.generate_further(PROMPT, completion(), context)
        )
        await until(lambda: waiting(client))
        busy[0].end()
        (await begun).close()
